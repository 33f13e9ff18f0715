"""Values on their way to a device: what arrives, and that staging memory is not overwritten before it has been read."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from stoker_engine.parallel import transfer
from stoker_engine.parallel.transfer import HostCopy, to_device

CPU = torch.device("cpu")


class SlowDevice:
    """A device that reads staging memory as late as it may: when the host waits for an event recorded afterwards."""

    def __init__(self) -> None:
        self.queue: list[tuple[torch.Tensor, np.ndarray]] = []
        self.num_read = 0

    def enqueue(self, staged: torch.Tensor, expected: np.ndarray) -> None:
        self.queue.append((staged, expected))

    def read(self, count: int) -> None:
        for staged, expected in self.queue[self.num_read : count]:
            assert np.array_equal(staged.numpy(), expected)
        self.num_read = max(self.num_read, count)

    def event(self) -> Any:
        device = self

        class Event:
            def record(self) -> None:
                self.position = len(device.queue)

            def synchronize(self) -> None:
                device.read(self.position)

        return Event()


@pytest.mark.parametrize("seed", range(4))
def test_staging_memory_is_read_before_it_is_overwritten(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes around a segment, and many small ones; a copy to the CPU is the staging memory itself."""
    segment, rng, device = 1 << 12, random.Random(seed), SlowDevice()
    monkeypatch.setattr(transfer, "_SEGMENT_BYTES", segment)
    staging = transfer._Staging()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    for _ in range(300):
        size = rng.choice((0, 16, 48, segment // 2, segment - 16, segment, rng.randrange(segment)))
        sizes = [rng.randrange(size + 1) for _ in range(rng.randrange(3))] if size < segment // 4 else [size]
        arrays = [np.frombuffer(rng.randbytes(each), dtype=np.uint8) for each in sizes]
        starts = [0, *itertools.accumulate(-(-each // 16) * 16 for each in sizes)]
        if starts[-1] > segment:
            continue
        staged = staging.copy(arrays, starts, CPU)
        assert len(staged) == starts[-1]
        for array, start in zip(arrays, starts, strict=False):
            device.enqueue(staged[start : start + len(array)], array)
    assert device.num_read > 200
    device.read(len(device.queue))


def test_an_array_larger_than_a_segment_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_SEGMENT_BYTES", 64)
    staging, large = transfer._Staging(), np.arange(100, dtype=np.uint8)
    first = staging.copy([large], [0, 112], CPU)
    second = staging.copy([large + np.uint8(1)], [0, 112], CPU)
    assert np.array_equal(first[:100].numpy(), large)
    assert np.array_equal(second[:100].numpy(), large + 1)


@pytest.mark.parametrize(
    ("numbers", "dtype", "expected"),
    [
        ([1, 2], None, torch.int64),
        ([[0.5, 1.0]], torch.float64, torch.float64),
        (np.array([1.5, 2.5]), torch.float32, torch.float32),
        (np.array([True, False]), None, torch.bool),
        ([], torch.int32, torch.int32),
    ],
)
def test_values_keep_their_dtype(numbers: Any, dtype: torch.dtype | None, expected: torch.dtype) -> None:
    tensor = to_device(numbers, CPU, dtype)
    assert tensor.dtype == expected
    assert tensor.tolist() == np.asarray(numbers).tolist()


def test_a_copy_on_the_host_keeps_the_values_of_its_creation() -> None:
    tensor = torch.tensor([[1, 2], [3, 4]])
    copied, number = HostCopy(tensor), HostCopy(torch.tensor(2.5))
    tensor.zero_()
    assert copied.values() == [[1, 2], [3, 4]]
    assert number.values() == 2.5
