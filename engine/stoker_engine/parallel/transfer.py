"""The two places where a step's numbers cross between host and device.

Beside them, sampling waits for the device where it branches on what it found (`sampling.logits`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

#: Bytes at whose multiples tensors begin that are copied together: what kernels assume of a tensor's address.
_ALIGNMENT: Final = 16


def to_device(
    numbers: np.ndarray | Sequence[Any], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Numbers of the host as a tensor; on the CPU an array's own memory. The host does not wait for the copy."""
    tensor = torch.from_numpy(numbers) if isinstance(numbers, np.ndarray) else torch.tensor(numbers, dtype=dtype)
    if dtype is not None:
        tensor = tensor.to(dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def all_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Arrays of the host as tensors, all by one copy; on the CPU each is the array's own memory."""
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
    """A tensor's numbers as lists; waits until the device has computed them."""
    return tensor.tolist()
