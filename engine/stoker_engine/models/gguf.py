"""GGUF files: the config from their metadata, and their tensors dequantized by the ``gguf`` library."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGUFEndian, GGUFReader, GGUFValueType
from gguf.quants import dequantize

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.contract.errors import ModelError, WeightsError
from stoker_engine.models.gguf_families import GGUFFamily, config_of, family_of
from stoker_engine.models.gguf_names import spelling
from stoker_engine.models.weight_names import WeightNames
from stoker_engine.models.weights import fill
from stoker_engine.quant.slot import Slot

#: Arrays longer than this are the tokenizer's; nothing we read has as many items.
_LONGEST_ARRAY: Final = 4096

#: Numbers dequantized at a time; a multiple of every quantization's block.
_PIECE: Final = 1 << 18


class _Reader(GGUFReader):
    """A GGUFReader that passes over long arrays: indexing a vocabulary of 262,144 tokens takes it several seconds, and
    `tokens.gguf_tokenizer` reads the vocabulary by itself.

    Nothing is read beyond the file's end, where the library reads nothing, as often as a damaged count says.
    """

    def _get(
        self, offset: int, dtype: Any, count: int = 1, override_order: Literal["I", "S", "<"] | None = None
    ) -> Any:
        if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise ValueError("it ends too early")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY or (count := int(self._get(orig_offs + 4, np.uint64)[0])) <= _LONGEST_ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        end = orig_offs + 12  # past the item's type and the count
        if item in self.gguf_scalar_to_np:
            end += count * np.dtype(self.gguf_scalar_to_np[item]).itemsize
        elif item is GGUFValueType.STRING:
            order: Literal["little", "big"] = "little" if self.endianess is GGUFEndian.LITTLE else "big"
            mapped: Any = self.data
            data = memoryview(mapped)
            for _ in range(count):
                end += 8 + int.from_bytes(data[end : end + 8], order)
                if end > len(data):
                    raise ValueError("it ends too early")
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return end - orig_offs, [], [], [GGUFValueType.ARRAY, item]


def _read(path: Path) -> _Reader:
    try:
        reader = _Reader(path)
    except RecursionError:
        raise ModelError(f"{path} is not a readable GGUF file: its arrays are nested too deeply") from None
    except Exception as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
    if reader.endianess is not GGUFEndian.LITTLE:
        raise ModelError(f"{path} is big-endian, which is not read; convert it with gguf-convert-endian")
    return reader


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


class GGUFFile:
    """One GGUF file: a config, its `Metadata` and a `WeightSource`. Of a split file, the first part stands for all.

    Raises:
        ModelError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _read(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        with _sensible(path):
            others = self._other_parts()
        for other in others:
            self._tensors |= {tensor.name: tensor for tensor in _read(other).tensors}

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
                "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
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
        field = self._reader.get_field(key)
        with _sensible(self.path):
            return None if field is None else field.contents()

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
        out = torch.empty(self._shape(name))
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
        target = slot.tensor
        if target.shape != self._shape(name) or not target.is_contiguous():
            fill(name, self.read(name), slot)
            return
        tensor = self._tensors[name]
        kind, numbers = tensor.tensor_type, target.view(-1)
        data = np.asarray(tensor.data).reshape(-1).view(np.uint8)
        block, block_bytes = GGML_QUANT_SIZES[kind]

        def dequantized(start: int) -> None:
            stop = min(start + _PIECE, len(numbers))
            packed = data[start // block * block_bytes : stop // block * block_bytes]
            # A copy where the values come straight from the read-only file mapping.
            piece = np.require(dequantize(packed[None], kind)[0], requirements="W")
            with torch.inference_mode():  # weights are made in it, and each thread enters it for itself
                numbers[start:stop] = torch.from_numpy(piece)

        try:
            list(self._threads.map(dequantized, range(0, len(numbers), _PIECE)))
        except NotImplementedError as error:
            raise WeightsError(f"{name}: GGUF type {kind.name} cannot be dequantized") from error

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        # Made with the first tensor: until then torch's threads may be more than this container has processors.
        return ThreadPoolExecutor(torch.get_num_threads())

    def _shape(self, name: str) -> torch.Size:
        return torch.Size(int(size) for size in reversed(self._tensors[name].shape))

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
