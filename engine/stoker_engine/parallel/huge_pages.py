"""Asks the system for large pages (2 MiB instead of 4 KiB).

Weights are read from end to end in every step. With small pages a processor looks up an address every 64 cache lines,
which costs up to a third of the speed at which it reads.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from typing import Final

import torch

_PAGE: Final = 2 << 20
_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25


def use_huge_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Before they are first written to. What lies in whole large pages gets them, where the system gives any."""
    _advise(tensors, _MADV_HUGEPAGE)


def collapse_pages(tensors: Iterable[torch.Tensor]) -> None:
    """After they were written: what still lies in small pages, since those were in use before, is moved to large ones.

    Does nothing before Linux 6.1.
    """
    _advise(tensors, _MADV_COLLAPSE)


def _advise(tensors: Iterable[torch.Tensor], advice: int) -> None:
    """Of all whole large pages. It is advice: a system that has none of them, or was built without, refuses; nothing is
    lost."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for first, end in _runs(tensor for tensor in tensors if tensor.device.type == "cpu"):
        for page in range(-(-first // _PAGE) * _PAGE, end // _PAGE * _PAGE, _PAGE):
            libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(_PAGE), advice)


def _runs(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Addresses of tensors that lie beside each other, with less than a page between them: the first, and behind the
    last. Those of small models are smaller than a page or two, and share pages."""
    begin = end = 0
    for first, size in sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors):
        if first - end >= _PAGE:
            yield begin, end
            begin = first
        end = max(end, first + size)
    yield begin, end
