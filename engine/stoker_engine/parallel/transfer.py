"""Transfers of a step's values between host and device.

Only `to_host` waits for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

#: Alignment of tensors that are copied together, in bytes. Kernels assume it for the address of a tensor.
_ALIGNMENT: Final = 16


def to_device(
    numbers: np.ndarray | Sequence[Any], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return values of the host as a tensor on `device`; on the CPU it shares an array's memory, unless `dtype`
    differs."""
    tensor = torch.from_numpy(numbers) if isinstance(numbers, np.ndarray) else torch.tensor(numbers, dtype=dtype)
    if dtype is not None:
        tensor = tensor.to(dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def all_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Return arrays of the host as tensors on `device`, copied in one transfer; on the CPU each shares its array's
    memory."""
    if device.type == "cpu":
        return [to_device(array, device) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    starts = [0, *itertools.accumulate(sizes)]
    packed = np.empty(starts[-1], dtype=np.uint8)
    for array, start in zip(arrays, starts, strict=False):
        packed[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    copied = to_device(packed, device)
    return [
        copied[start : start + array.nbytes].view(getattr(torch, array.dtype.name)).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


def to_host(tensor: torch.Tensor) -> Any:
    """Return a tensor's values as nested lists, or the value of a scalar. Waits until the device has computed them."""
    return tensor.tolist()
