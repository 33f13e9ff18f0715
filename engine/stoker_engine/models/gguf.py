"""GGUF files: the config from their metadata, and their tensors dequantized by the ``gguf`` library.

llama.cpp's converter writes Gemma's norm weights with their offset of 1 already added.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from gguf import GGUFEndian, GGUFReader, GGUFValueType
from gguf.quants import dequantize

from stoker_engine.contract.errors import ModelError, WeightsError
from stoker_engine.contract.model_config import ModelConfig

#: GGUF's architecture → ours, and its metadata keys → config.json's.
_ARCHITECTURES: Final = {"gemma3": "Gemma3ForCausalLM"}
_KEYS: Final = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.key_length": "head_dim",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}


#: Arrays longer than this are the tokenizer's; nothing we read has as many items.
_LONGEST_ARRAY: Final = 4096


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
    """One GGUF file: a config and a `WeightSource`.

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

    def config(self) -> ModelConfig:
        """The model's shape.

        Raises:
            ModelError: an architecture that is not read from GGUF, or a stretched rope.
        """
        name = self._field("general.architecture")
        if name not in _ARCHITECTURES:
            raise ModelError(f"GGUF architecture {name!r} is not supported; supported is {', '.join(_ARCHITECTURES)}")
        if self._field(f"{name}.rope.scaling.type") not in (None, "none"):
            raise ModelError(f"{self.path}: rope scaling from GGUF metadata is not supported")
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[name]],
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id"),
            "dtype": "float32",
        }
        for key, ours in _KEYS.items():
            config[ours] = self._field(f"{name}.{key}")
        return ModelConfig.from_dict(config)

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
            # A copy where the values come straight from the read-only file mapping.
            return torch.from_numpy(
                np.require(dequantize(np.asarray(tensor.data), tensor.tensor_type), requirements="W")
            )
        except NotImplementedError as error:
            raise WeightsError(f"{name}: GGUF type {tensor.tensor_type.name} cannot be dequantized") from error

    def _field(self, key: str) -> Any:
        field = self._reader.get_field(key)
        return None if field is None else field.contents()
