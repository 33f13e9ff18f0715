"""A stray address of a kernel ends the process, for reads and writes, operands and allocations."""

from __future__ import annotations

import faulthandler
import os
import signal

import pytest
import torch
import triton
import triton.language as tl

from .conftest import ON_CHIP


@triton.jit
def _copy(source, made, read, write):  # type: ignore[no-untyped-def]
    tl.store(made + write, tl.load(source + read))


@torch.library.custom_op("stoker::test_guards_copy", mutates_args=())
def copy(x: torch.Tensor, read: int, write: int) -> torch.Tensor:
    """Copy an element from one place to another, of an allocated tensor."""
    made = torch.empty_like(x)
    _copy[(1,)](x, made, read, write)
    return made


@pytest.mark.skipif(ON_CHIP, reason="guards are of the host's memory")
@pytest.mark.parametrize("size", [5, 1024, 4099])
def test_a_stray_address_ends_the_process(size: int) -> None:
    source = torch.arange(size)
    assert copy(source, size - 1, 0)[0] == size - 1
    for read, write in ((size, 0), (0, size), (-1024, 0)):
        child = os.fork()
        if not child:
            faulthandler.disable()
            copy(source, read, write)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV
