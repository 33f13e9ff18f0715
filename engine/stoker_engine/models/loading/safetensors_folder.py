"""Weights from the ``*.safetensors`` files of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open

from stoker_common.errors import WeightsError
from stoker_engine.architectures.stored_formats import StoredFormat
from stoker_engine.models.loading.weight_files import weight_files
from stoker_engine.models.loading.weight_source import Part, check_shape
from stoker_engine.quant.weight_target import WeightTarget


class RawTensors:
    """Tensors of any dtype, found through the index file if there is one; see `quant.checkpoints.module.Tensors`.

    Raises:
        ModelError: the index is invalid.
        WeightsError: the folder has no safetensors, lacks a file that the index names, or has an unreadable file.
    """

    def __init__(self, folder: Path) -> None:
        paths = weight_files(folder)
        try:
            self._files: list[Any] = [safe_open(path, framework="pt") for path in paths]
        except Exception as error:
            raise WeightsError(f"cannot read the weights in {folder}: {error}") from error
        self._names = {path.name: list(file.keys()) for path, file in zip(paths, self._files, strict=True)}
        self._file_of = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118

    def names(self) -> list[str]:
        """See `Tensors`."""
        return list(self._file_of)

    def by_file(self) -> dict[str, list[str]]:
        """Return the tensor names by file name."""
        return self._names

    def shape(self, name: str) -> torch.Size:
        """See `Tensors`."""
        return torch.Size(self._file_of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype | None:
        """See `Tensors`."""
        return DTYPES.get(self._file_of[name].get_slice(name).get_dtype())

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """See `Tensors`. A whole tensor is a view of the file; a part is a copy."""
        file = self._file_of[name]
        tensor: torch.Tensor = file.get_tensor(name) if part is None else file.get_slice(name)[part]
        return tensor


class SafetensorsFolder:
    """A folder's unquantized tensors as a `WeightSource`.

    Raises:
        ModelError, WeightsError: see `RawTensors`.
    """

    def __init__(self, folder: Path) -> None:
        self.tensors = RawTensors(folder)

    def names(self) -> list[str]:
        """See `WeightSource`."""
        return self.tensors.names()

    def shape(self, name: str) -> torch.Size:
        """See `WeightSource`."""
        return self.tensors.shape(name)

    def stored(self, name: str) -> StoredFormat | None:
        """See `WeightSource`."""
        return None

    def read(self, name: str, part: Part | None = None, stored: StoredFormat | None = None) -> torch.Tensor:
        """See `WeightSource`.

        Raises:
            WeightsError: the tensor does not hold floating-point numbers.
        """
        assert stored is None, "these are numbers"
        tensor = self.tensors.read(name, part)
        if not tensor.is_floating_point():
            raise not_floating(name, str(tensor.dtype).removeprefix("torch."))
        return tensor

    def not_floating(self) -> dict[str, str]:
        """Return the dtypes of tensors that are not floating-point, by tensor name. Tensors of unknown dtypes are
        omitted."""
        dtypes = {name: self.tensors.dtype(name) for name in self.names()}
        return {
            name: str(dtype).removeprefix("torch.")
            for name, dtype in dtypes.items()
            if dtype is not None and not dtype.is_floating_point
        }

    def read_into(self, name: str, target: WeightTarget) -> None:
        """See `WeightSource`."""
        check_shape(name, self.shape(name), target)
        target.tensor.copy_(self.read(name, target.shard))


def not_floating(name: str, dtype: str) -> WeightsError:
    """Return the error for a tensor that is not floating-point but would be used as unquantized weights."""
    return WeightsError(
        f"{name} holds {dtype}, not floating-point numbers, but config.json has no quantization_config; "
        "convert the model to bfloat16: load it with the library that quantized it, dequantize and save it"
    )


#: Safetensors' dtype names → torch dtypes.
DTYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
