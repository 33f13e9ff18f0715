"""Advice to the kernel about a tensor's memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from stoker_engine.parallel.huge_pages import collapse_pages, use_huge_pages

pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no large pages"
)


def _of_mapping(address: int, name: str) -> list[str]:
    """Return the lines with this name in /proc/self/smaps for the mapping of an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(bound, 16) for bound in words[0].split("-"))
            inside = begin <= address < end
        elif inside and words[0] == f"{name}:":
            return words[1:]
    raise LookupError(address)


def _is_advised(address: int) -> bool:
    return "hg" in _of_mapping(address, "VmFlags")


def test_huge_pages_are_requested_for_large_tensors() -> None:
    """Data written there stays."""
    # Its own mapping: memory from the allocator may lie in huge pages requested for another matrix.
    tensor = torch.frombuffer(mmap.mmap(-1, 40 << 20), dtype=torch.uint8)
    middle = tensor.data_ptr() + (20 << 20)
    assert not _is_advised(middle)
    use_huge_pages([tensor])
    assert _is_advised(middle)
    tensor.fill_(7)
    assert tensor.eq(7).all()


def test_adjacent_small_tensors_share_huge_pages() -> None:
    """Memory in use is moved. Tensors far from all others stay in place."""
    mapping = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapping, dtype=torch.uint8).fill_(3)
    many = list(memory[: 20 << 20].split(300_000))
    far = memory[40 << 20 : (40 << 20) + 4096]
    collapse_pages([*reversed(many), far, torch.empty(0), torch.empty(8, device="meta")])
    kib = int(_of_mapping(memory.data_ptr() + (10 << 20), "AnonHugePages")[0])
    if not kib:
        pytest.skip("this system collapses no pages")
    assert 16 << 10 <= kib <= 20 << 10
    assert memory.eq(3).all()
