"""Transfers of a step's values between host and device.

Values go to a device through page-locked memory, so that the host need not wait until they are copied; it waits only
before it reuses memory that the device has not read. `to_host` and `HostCopy.values` wait until the device has computed
the values.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import torch

#: Alignment of tensors that are copied together, in bytes. Kernels assume it for the address of a tensor.
_ALIGNMENT: Final = 16

#: Number of segments of page-locked memory, and bytes of each.
_NUM_SEGMENTS, _SEGMENT_BYTES = 4, 4 << 20


def to_device(
    numbers: np.ndarray | Sequence[Any], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return values of the host as a tensor on `device`; on the CPU it shares an array's memory, unless `dtype`
    differs. `dtype` must be one that NumPy has."""
    array = np.asarray(numbers)
    if dtype is not None:
        array = array.astype(str(dtype).removeprefix("torch."), copy=False)
    return torch.from_numpy(array) if device.type == "cpu" else all_to_device([array], device)[0]


def all_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Return arrays of the host as tensors on `device`, copied in one transfer; on the CPU each shares its array's
    memory."""
    if device.type == "cpu":
        return [to_device(array, device) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    starts = [0, *itertools.accumulate(sizes)]
    copied = _staging().copy(arrays, starts, device)
    return [
        copied[start : start + array.nbytes].view(getattr(torch, array.dtype.name)).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


def to_host(tensor: torch.Tensor) -> Any:
    """Return a tensor's values as nested lists, or the value of a scalar. Waits until the device has computed them."""
    return tensor.tolist()


class HostCopy:
    """A copy of a tensor's values on the host, which is complete once the device has computed the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "cpu":
            values = tensor.tolist()
            self._get: Callable[[], Any] = lambda: values
            return
        copied, event = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True), torch.cuda.Event()
        copied.copy_(tensor, non_blocking=True)
        event.record()

        def get() -> Any:
            event.synchronize()
            return copied.tolist()

        self._get = get

    def values(self) -> Any:
        """Return the values as nested lists. Waits until the copy is complete."""
        return self._get()


class _PageLocked:
    """Memory that a device can copy from while the host goes on; ordinary memory if CUDA is not used, as with fake
    tensors.

    Attributes:
        tensor: uint8 [bytes].
        array: the same memory.
    """

    def __init__(self, size: int) -> None:
        if torch.cuda.is_initialized():
            self.tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self.array = self.tensor.numpy()
        else:
            self.array = np.empty(size, dtype=np.uint8)
            self.tensor = torch.from_numpy(self.array)

    def copy(
        self, arrays: Sequence[np.ndarray], starts: Sequence[int], first: int, device: torch.device
    ) -> torch.Tensor:
        """Write arrays from byte `first` on, and start to copy them; see `_Staging.copy`."""
        for array, start in zip(arrays, starts, strict=False):
            begin = first + start
            self.array[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return self.tensor[first : first + starts[-1]].to(device, non_blocking=True)


class _Staging:
    """Page-locked memory that values pass through on their way to a device: a ring of segments, allocated once. A
    segment is overwritten only after the device has read it."""

    def __init__(self) -> None:
        self._segments = [_PageLocked(_SEGMENT_BYTES) for _ in range(_NUM_SEGMENTS)]
        self._read: list[torch.cuda.Event | None] = [None] * _NUM_SEGMENTS
        self._current = self._used = 0
        self._lock = threading.Lock()

    def copy(self, arrays: Sequence[np.ndarray], starts: Sequence[int], device: torch.device) -> torch.Tensor:
        """Start to copy arrays to a device. Returns uint8 [bytes], with array i from byte `starts[i]` on.

        Args:
            starts: one more than arrays, multiples of `_ALIGNMENT`; the last is the number of bytes.
        """
        size = starts[-1]
        if size > _SEGMENT_BYTES:  # rare: it gets memory of its own
            return _PageLocked(size).copy(arrays, starts, 0, device)
        with self._lock:
            if self._used + size > _SEGMENT_BYTES:
                self._next_segment()
            self._used += size
            return self._segments[self._current].copy(arrays, starts, self._used - size, device)

    def _next_segment(self) -> None:
        if torch.cuda.is_initialized():
            read = self._read[self._current] = torch.cuda.Event()
            read.record()
        self._current, self._used = (self._current + 1) % _NUM_SEGMENTS, 0
        if (before := self._read[self._current]) is not None:
            before.synchronize()


@cache
def _staging() -> _Staging:
    return _Staging()
