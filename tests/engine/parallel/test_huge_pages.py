"""What the system was told of a tensor's memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from stoker_engine.parallel.huge_pages import use_huge_pages

pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no large pages"
)


def _is_advised(address: int) -> bool:
    """Whether the mapping of an address asks for large pages, by /proc/self/smaps."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(bound, 16) for bound in words[0].split("-"))
            inside = begin <= address < end
        elif inside and words[0] == "VmFlags:":
            return "hg" in words
    raise LookupError(address)


def test_whole_pages_of_a_matrix_are_asked_for() -> None:
    """And what is written there stays."""
    # Memory of its own, since what the allocator hands out may lie in large pages that another matrix asked for.
    tensor = torch.frombuffer(mmap.mmap(-1, 40 << 20), dtype=torch.uint8)
    middle = tensor.data_ptr() + (20 << 20)
    assert not _is_advised(middle)
    use_huge_pages(tensor)
    assert _is_advised(middle)
    tensor.fill_(7)
    assert tensor.eq(7).all()
