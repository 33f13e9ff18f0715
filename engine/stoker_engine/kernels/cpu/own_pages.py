"""Memory that is mapped separately, so that its pages are returned to the system when it is freed; malloc might keep
freed memory."""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

import torch

#: Bytes of a huge page. One page fault for it takes less time than 512 for small pages.
HUGE_PAGE: Final = 2 << 20


def own_pages(num_bytes: int, num_huge_bytes: int) -> torch.Tensor:
    """Return zeroed memory, uint8 [num_bytes].

    Args:
        num_huge_bytes: number of bytes from the start for which huge pages are requested; 0: none.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_huge_bytes:
        with contextlib.suppress(OSError):  # the system has no huge pages
            pages.madvise(mmap.MADV_HUGEPAGE, 0, num_huge_bytes)
    return torch.frombuffer(pages, dtype=torch.uint8)
