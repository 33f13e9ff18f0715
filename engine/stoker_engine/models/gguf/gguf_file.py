"""GGUF files: config from the metadata, and tensors as blocks or dequantized by the ``gguf`` library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from gguf import GGMLQuantizationType

from stoker_common.errors import ModelError
from stoker_engine.architectures.families.family import GGUFFamily
from stoker_engine.architectures.gguf.gguf_config import gguf_config, gguf_family
from stoker_engine.architectures.gguf.gguf_names import gguf_weight_names
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.stored_formats import GGUF_FORMATS, StoredFormat
from stoker_engine.architectures.weight_names import WeightNames
from stoker_engine.models.gguf.gguf_header import GGUFHeader
from stoker_engine.models.gguf.gguf_tensor import stored_tensors
from stoker_engine.models.loading.weight_source import Part, check_shape
from stoker_engine.parallel.device import usable_threads
from stoker_engine.quant.weight_target import WeightTarget

#: ggml's unquantized types, except the 16-bit floating-point ones.
_PLAIN: Final = ("F32", "F64", "I8", "I16", "I32", "I64")

#: ggml's floating-point types.
FLOATING: Final = tuple(GGMLQuantizationType[name] for name in ("F64", "F32", "F16", "BF16"))


@contextmanager
def _sensible(path: Path) -> Iterator[None]:
    """Convert errors caused by invalid metadata, such as a string instead of a count.

    Raises:
        ModelError: the metadata are invalid.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{path} has invalid metadata: {type(error).__name__}: {error}") from error


class GGUFFile:
    """A GGUF file as config, `Metadata` and `WeightSource`. For a split model, `path` is the first part.

    Raises:
        ModelError: the file, or another part of a split model, cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header = GGUFHeader(path)
        self._tensors = stored_tensors(path, self._header)
        with _sensible(path):
            others = self._other_parts()
        for other in others:
            more = stored_tensors(other, GGUFHeader(other))
            if doubled := sorted(self._tensors.keys() & more.keys()):
                raise ModelError(f"{other} contains {doubled[0][:100]}, which is also in another part of the model")
            self._tensors |= more

    def config(self) -> ModelConfig:
        """Return the model's shape.

        Raises:
            ModelError: the architecture is not supported in GGUF, or the metadata are invalid.
        """
        with _sensible(self.path):
            return self._config()

    def _config(self) -> ModelConfig:
        family = self._family()
        if not self.has("token_embd.weight"):
            raise ModelError(f"{self.path} has no token_embd.weight; the file is not a complete language model")
        stops = [self.field(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        return ModelConfig.from_dict(
            {
                **gguf_config(family, self),
                "architectures": [family.architecture],
                "vocab_size": int(self._tensors["token_embd.weight"].shape[0]),
                "tie_word_embeddings": not self.has("output.weight"),
                "eos_token_id": [stop for stop in stops if stop is not None] or None,
                "dtype": self._dtype(),
            }
        )

    def _dtype(self) -> str:
        """Return the compute dtype, which GGUF does not state: float32 if all matrices are float32 or float64, else
        bfloat16, which is fast on CPUs and GPUs and more precise than the 8-bit activations of llama.cpp."""
        wide = ("F32", "F64")
        return "float32" if all(t.kind.name in wide for t in self._tensors.values() if len(t.shape) > 1) else "bfloat16"

    def weight_names(self) -> WeightNames:
        """Return the map from the file's tensor names to parameters."""
        return gguf_weight_names(self._family(), self)

    def field(self, key: str) -> Any:
        """Return the metadata value of `key`, or None."""
        return self._header.get(key)

    def get(self, key: str, default: Any = None) -> Any:
        """See `Metadata`."""
        value = self.field(f"{self._architecture()}.{key}")
        return default if value is None else value

    def has(self, tensor: str) -> bool:
        """See `Metadata`."""
        return tensor in self._tensors

    def values(self, tensor: str) -> list[float]:
        """See `Metadata`."""
        return self.read(tensor).tolist()

    def names(self) -> list[str]:
        """See `WeightSource`."""
        return list(self._tensors)

    def kinds(self) -> dict[str, GGMLQuantizationType]:
        """Return each tensor's ggml type, by tensor name."""
        return {name: tensor.kind for name, tensor in self._tensors.items()}

    def quantized_as(self) -> str | None:
        """Return the most frequent ggml type of the layers' quantized matrices, or None if there are none. Embedding
        and head, whose types often differ, are not counted."""
        types = Counter(
            tensor.kind.name
            for name, tensor in self._tensors.items()
            if name.startswith("blk.") and len(tensor.shape) > 1 and tensor.kind.name not in (*_PLAIN, "F16", "BF16")
        )
        return types.most_common(1)[0][0] if types else None

    def shape(self, name: str) -> torch.Size:
        """See `WeightSource`."""
        return self._tensors[name].shape

    def stored(self, name: str) -> StoredFormat | None:
        """See `WeightSource`."""
        return GGUF_FORMATS.get(self._tensors[name].kind.name)

    def other_types(self) -> dict[str, int]:
        """Return the number of tensors of each quantized type without a kernel, by the type's name. They are
        dequantized."""
        names = [tensor.kind.name for tensor in self._tensors.values()]
        return dict(Counter(name for name in names if name not in GGUF_FORMATS and name not in _PLAIN))

    def read(self, name: str, part: Part | None = None, stored: StoredFormat | None = None) -> torch.Tensor:
        """See `WeightSource`. Dequantized values are float32.

        Raises:
            WeightsError: the library cannot dequantize the tensor's type, or the file cannot be read.
        """
        tensor = self._tensors[name]
        part = tensor.whole if part is None else part
        sizes = [each.stop - each.start for each in part]
        if stored is not None:
            out = torch.empty([*sizes[:-1], stored.row_bytes(sizes[-1])], dtype=torch.uint8)
            tensor.copy(part, out, self._threads)
            return out
        out = torch.empty(sizes)
        tensor.dequantize(part, out, self._threads)
        return out

    def read_into(self, name: str, target: WeightTarget) -> None:
        """See `WeightSource`.

        Raises:
            WeightsError: the shape is wrong, or the library cannot dequantize the tensor's type.
        """
        tensor = self._tensors[name]
        check_shape(name, tensor.shape, target)
        if not target.tensor.is_contiguous():
            target.tensor.copy_(self.read(name, target.shard, target.stored))
            return
        read = tensor.dequantize if target.stored is None else tensor.copy
        read(target.shard or tensor.whole, target.tensor, self._threads)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(usable_threads())

    def _other_parts(self) -> list[Path]:
        count, number = self.field("split.count") or 1, self.field("split.no") or 0
        if number:
            raise ModelError(f"{self.path} is part {number + 1} of {count} of a split model; give the first part")
        if not 1 <= count < 100_000:
            raise ModelError(f"{self.path} is part of a model of {count} files; the maximum is 99999")
        first = f"-00001-of-{count:05d}"
        if count > 1 and first not in self.path.stem:
            raise ModelError(f"{self.path} is the first of {count} parts; its name must end with {first}.gguf")
        stem = self.path.stem.removesuffix(first)
        return [self.path.with_name(f"{stem}-{part:05d}-of-{count:05d}.gguf") for part in range(2, count + 1)]

    def _architecture(self) -> str:
        return str(self.field("general.architecture"))

    def _family(self) -> GGUFFamily:
        return gguf_family(self._architecture(), self)
