"""GGUF files: the config from their metadata, and their tensors dequantized by the ``gguf`` library."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.contract.errors import ModelError, WeightsError
from stoker_engine.models.gguf_families import GGUFFamily, config_of, family_of
from stoker_engine.models.gguf_header import GGUFHeader
from stoker_engine.models.gguf_names import spelling
from stoker_engine.models.weight_names import WeightNames
from stoker_engine.models.weights import fill
from stoker_engine.quant.slot import Slot

#: Numbers dequantized at a time; a multiple of every quantization's block.
_PIECE: Final = 1 << 18


@contextmanager
def _sensible(path: Path) -> Iterator[None]:
    """Metadata may be anything: a string where a count belongs, a vocabulary of one dimension.

    Raises:
        ModelError: what came of that.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{path} has metadata that do not fit together: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class _Stored:
    """A tensor in one of the files."""

    file: BinaryIO
    shape: torch.Size
    kind: GGMLQuantizationType
    start: int

    def read(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Bytes `start` … `stop` of the tensor's."""
        data = np.empty(stop - start, dtype=np.uint8)
        done = 0
        while done < len(data):
            count = os.preadv(self.file.fileno(), [data.data[done:]], self.start + start + done)
            if not count:
                raise OSError("it has become shorter")
            done += count
        return data


def _stored(path: Path, header: GGUFHeader) -> dict[str, _Stored]:
    """The tensors of one file, whose data are known to lie in it.

    Raises:
        ModelError: they do not, or are of an unknown type.
    """
    file = path.open("rb")
    size, stored = path.stat().st_size, dict[str, _Stored]()
    for name, tensor in header.tensors.items():
        if tensor.kind not in GGML_QUANT_SIZES:
            raise ModelError(
                f"{path}: {name[:100]} is of type {tensor.kind}, which is unknown; try a newer gguf library"
            )
        kind = GGMLQuantizationType(tensor.kind)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        numbers = math.prod(tensor.shape)
        if tensor.shape and tensor.shape[-1] % block:
            raise ModelError(
                f"{path}: {name[:100]} has rows of {tensor.shape[-1]} numbers, {kind.name} blocks of {block}"
            )
        if tensor.start + numbers // block * block_bytes > size:
            raise ModelError(f"{path} is not a readable GGUF file: it ends too early")
        stored[name] = _Stored(file, torch.Size(tensor.shape), kind, tensor.start)
    return stored


class GGUFFile:
    """One GGUF file: a config, its `Metadata` and a `WeightSource`. Of a split file, the first part stands for all.

    Raises:
        ModelError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header = GGUFHeader(path)
        self._tensors = _stored(path, self._header)
        with _sensible(path):
            others = self._other_parts()
        for other in others:
            self._tensors |= _stored(other, GGUFHeader(other))

    def config(self) -> ModelConfig:
        """The model's shape.

        Raises:
            ModelError: an architecture that is not read from GGUF, or metadata that do not fit together.
        """
        with _sensible(self.path):
            return self._config()

    def _config(self) -> ModelConfig:
        family = self._family()
        if not self.has("token_embd.weight"):
            raise ModelError(f"{self.path} has no token_embd.weight, so it is no complete language model")
        stops = [self.field(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        return ModelConfig.from_dict(
            {
                **config_of(family, self),
                "architectures": [family.architecture],
                "vocab_size": int(self._tensors["token_embd.weight"].shape[0]),
                "tie_word_embeddings": not self.has("output.weight"),
                "eos_token_id": [stop for stop in stops if stop is not None] or None,
                "dtype": "float32",
            }
        )

    def spelling(self) -> WeightNames:
        """How the file spells its weights."""
        family = self._family()
        return spelling(family.names(self), dict(family.fused), turned=family.turned)

    def field(self, key: str) -> Any:
        """The metadata's value under `key`; None: there is none."""
        return self._header.get(key)

    def get(self, key: str, default: Any = None) -> Any:
        """See `Metadata`."""
        value = self.field(f"{self._architecture()}.{key}")
        return default if value is None else value

    def has(self, tensor: str) -> bool:
        """See `Metadata`."""
        return tensor in self._tensors

    def names(self) -> list[str]:
        """See `WeightSource`."""
        return list(self._tensors)

    def read(self, name: str) -> torch.Tensor:
        """See `WeightSource`; dequantized to float32.

        Raises:
            WeightsError: a quantization that the library cannot undo.
        """
        out = torch.empty(self._tensors[name].shape)
        self.read_into(name, Slot.whole(out))
        return out

    def read_into(self, name: str, slot: Slot) -> None:
        """See `WeightSource`; several pieces at a time.

        The library goes 16 rows by 16 rows and joins them at last: for a vocabulary's rows, short and many, the calls
        take longer than the arithmetic. A piece is one long row to it, and stays in the processor's cache on its way
        to the target.

        Raises:
            WeightsError: another shape, or a quantization that the library cannot undo.
        """
        tensor, target = self._tensors[name], slot.tensor
        if target.shape != tensor.shape or not target.is_contiguous():
            fill(name, self.read(name), slot)
            return
        numbers = target.view(-1)
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]

        def dequantized(start: int) -> None:
            stop = min(start + _PIECE, len(numbers))
            packed = tensor.read(start // block * block_bytes, stop // block * block_bytes)
            piece = dequantize(packed[None], tensor.kind)[0]
            with torch.inference_mode():  # weights are made in it, and each thread enters it for itself
                numbers[start:stop] = torch.from_numpy(piece)

        try:
            list(self._threads.map(dequantized, range(0, len(numbers), _PIECE)))
        except NotImplementedError as error:
            raise WeightsError(f"{name}: GGUF type {tensor.kind.name} cannot be dequantized") from error
        except OSError as error:
            raise WeightsError(f"{name}: cannot read {tensor.file.name}: {error}") from error

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        # Made with the first tensor: until then torch's threads may be more than this container has processors.
        return ThreadPoolExecutor(torch.get_num_threads())

    def _other_parts(self) -> list[Path]:
        count, number = self.field("split.count") or 1, self.field("split.no") or 0
        if number:
            raise ModelError(f"{self.path} is part {number + 1} of {count} of a split model; give the first part")
        if not 1 <= count < 100_000:
            raise ModelError(f"{self.path} is part of a model of {count} files, and there are at most 99999")
        first = f"-00001-of-{count:05d}"
        if count > 1 and first not in self.path.stem:
            raise ModelError(f"{self.path} is the first of {count} parts, and its name must end with {first}.gguf")
        stem = self.path.stem.removesuffix(first)
        return [self.path.with_name(f"{stem}-{part:05d}-of-{count:05d}.gguf") for part in range(2, count + 1)]

    def _architecture(self) -> str:
        return str(self.field("general.architecture"))

    def _family(self) -> GGUFFamily:
        return family_of(self._architecture(), self)
