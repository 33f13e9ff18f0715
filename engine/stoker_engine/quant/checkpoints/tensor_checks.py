"""Checks of the tensors of quantized matrices; they read only the files' headers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from stoker_common.errors import WeightsError
from stoker_engine.quant.checkpoints.grouped_matrix import dtype_name
from stoker_engine.quant.checkpoints.module import Tensors

#: Valid dtypes of floating-point scales.
NUMBERS: Final = (torch.float32, torch.float16, torch.bfloat16)


def check_tensor(tensors: Tensors, name: str, shape: Sequence[int], *dtypes: torch.dtype) -> None:
    """Check that the tensor called `name` has the given shape, and one of the given dtypes.

    Raises:
        WeightsError: it has a different shape or dtype.
    """
    found, dtype = tensors.shape(name), tensors.dtype(name)
    if dtype not in dtypes:
        known = " or ".join(map(dtype_name, dtypes))
        raise WeightsError(f"{name} holds {dtype_name(dtype)}, but its matrix needs {known}; download the file again")
    if tuple(found) != tuple(shape):
        raise WeightsError(
            f"{name} has shape {tuple(found)}, but config.json's quantization_config needs {tuple(shape)}"
        )


def check_dimensions(tensors: Tensors, name: str, count: int) -> None:
    """Check that the tensor called `name` has `count` dimensions.

    Raises:
        WeightsError: it has a different number of dimensions.
    """
    if len(shape := tensors.shape(name)) != count:
        raise WeightsError(f"{name} has shape {tuple(shape)}, but its matrix needs {count} dimensions")
