"""GGUF files: the config from their metadata, and their tensors dequantized by the ``gguf`` library."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGUFEndian, GGUFReader, GGUFValueType, ReaderTensor
from gguf.quants import dequantize

from stoker_engine.contract.errors import ModelError, WeightsError
from stoker_engine.contract.model_config import ModelConfig
from stoker_engine.models.gguf_families import GGUFFamily, config_of, family_of
from stoker_engine.models.gguf_names import spelling
from stoker_engine.models.weight_names import WeightNames

#: Arrays longer than this are the tokenizer's; nothing we read has as many items.
_LONGEST_ARRAY: Final = 4096

#: Numbers dequantized at a time; a multiple of every quantization's block.
_PIECE: Final = 1 << 19


class _Reader(GGUFReader):
    """A GGUFReader that passes over long arrays: indexing a vocabulary of 262,144 tokens takes it several seconds, and
    the tokenizer is read by transformers."""

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
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return end - orig_offs, [], [], [GGUFValueType.ARRAY, item]


class GGUFFile:
    """One GGUF file: a config, its `Metadata` and a `WeightSource`.

    Raises:
        ModelError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = _Reader(path)
        except Exception as error:
            raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._threads = ThreadPoolExecutor(torch.get_num_threads())

    def config(self) -> ModelConfig:
        """The model's shape.

        Raises:
            ModelError: an architecture that is not read from GGUF, or a stretched rope.
        """
        family = self._family()
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
        tensor = self._tensors[name]
        try:
            return _dequantized(tensor, self._threads)
        except NotImplementedError as error:
            raise WeightsError(f"{name}: GGUF type {tensor.tensor_type.name} cannot be dequantized") from error

    def _architecture(self) -> str:
        return str(self.field("general.architecture"))

    def _family(self) -> GGUFFamily:
        return family_of(self._architecture(), self)


def _dequantized(tensor: ReaderTensor, threads: ThreadPoolExecutor) -> torch.Tensor:
    """`tensor` in float32, several pieces at a time.

    The library goes 16 rows by 16 rows and joins them at last: for a vocabulary's rows, short and many, the calls
    take longer than the arithmetic. A piece is one long row to it, and stays in the processor's cache on its way.
    """
    kind = tensor.tensor_type
    data = np.asarray(tensor.data).reshape(-1).view(np.uint8)
    out = np.empty([int(size) for size in reversed(tensor.shape)], dtype=np.float32)
    numbers = out.reshape(-1)
    block, block_bytes = GGML_QUANT_SIZES[kind]

    def fill(start: int) -> None:
        stop = min(start + _PIECE, len(numbers))
        packed = data[start // block * block_bytes : stop // block * block_bytes]
        numbers[start:stop] = dequantize(packed[None], kind)[0]

    list(threads.map(fill, range(0, len(numbers), _PIECE)))
    return torch.from_numpy(out)
