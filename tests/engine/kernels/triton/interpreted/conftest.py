"""Triton's kernels without a GPU: the interpreter runs them on CPU tensors, one program after another.

It is selected when a kernel is decorated, so these tests have their own process (`../interpreter.py`). The operands of
an operation lie between inaccessible pages, so that a stray address ends the process; faulthandler prints where.

With STOKER_ON_CHIP=1 (`make test-gpu`) the same tests run on a GPU: tensors are created and compared on the CPU, and
each operation copies them to the GPU and its results back.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch._library import custom_ops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from stoker_engine.attention import select

from .....support.engine.guarded_cache import GuardedBlocks

ON_CHIP: Final = os.environ.get("STOKER_ON_CHIP") == "1"
#: Device that runs the kernels.
DEVICE: Final = os.environ.get("STOKER_CHIP", "cuda") if ON_CHIP else "cpu"
collect_ignore_glob = [] if ON_CHIP or os.environ.get("TRITON_INTERPRET") == "1" else ["*"]

#: Largest guarded storage in bytes; larger ones are caches, which have their own guards.
_LARGEST: Final = 1 << 24
_PAGE: Final = mmap.PAGESIZE
#: Bytes on each side.
_GUARD: Final = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


class Moved(TorchDispatchMode):
    """Runs operations on copies of storages, and copies written parts back.

    Whole storages are copied, because operands may be strided views, and several may share a storage.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace != "stoker":
            return self._run_other(func, args, kwargs or {})
        copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

        def taken(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            storage = value.untyped_storage()
            if storage._cdata not in copies:
                copies[storage._cdata] = storage, self._copy(storage)
            copied = copies[storage._cdata][1]
            empty = torch.empty(0, dtype=value.dtype, device=copied.device)
            return empty.set_(copied, value.storage_offset(), value.shape, value.stride())

        result = self._run(func, tree_map(taken, args), tree_map(taken, kwargs or {}))
        for storage, copied in copies.values():
            if copied is not storage:
                storage.copy_(copied)
        assert all(isinstance(each, torch.Tensor) for each in tree_leaves(result) if each is not None)
        return tree_map(torch.Tensor.cpu, result) if result is not None else None

    def _copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        raise NotImplementedError

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def _run_other(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class OnDevice(Moved):
    """Runs operations on another device than that of their tensors."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def _copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return torch.UntypedStorage(storage.nbytes(), device=self._device).copy_(storage)


class BetweenGuards(Moved):
    """Runs operations on memory between inaccessible pages, including what they allocate."""

    _running = False

    def _copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if not 0 < storage.nbytes() <= _LARGEST:
            return storage
        return _between_guards(storage.nbytes()).untyped_storage().copy_(storage)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        operation = custom_ops._maybe_get_opdef(func)
        assert operation is not None
        self._running = True
        try:
            with self:  # re-enters the mode, which guards the allocations of the operation
                return operation._init_fn(*args, **kwargs)
        finally:
            self._running = False

    def _run_other(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if self._running and func._opname in ("empty", "new_empty", "empty_like") and result.numel():
            storage = _between_guards(result.untyped_storage().nbytes()).untyped_storage()
            return torch.empty(0, dtype=result.dtype).set_(storage, 0, result.shape, result.stride())
        return result


def _between_guards(size: int) -> torch.Tensor:
    """Return uint8 [size], NaN in every dtype, with inaccessible pages directly after it, and before it."""
    end = _GUARD + -(-size // _PAGE) * _PAGE
    memory = mmap.mmap(-1, end + _GUARD, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    for begin in (0, end):
        if _libc.mprotect(ctypes.c_void_p(whole.data_ptr() + begin), ctypes.c_size_t(_GUARD), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    # A separate storage that starts with the tensor.
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=end - size).fill_(0xFF)


@pytest.fixture(autouse=True)
def _on_chip(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not ON_CHIP:
        with BetweenGuards():
            yield
        return
    # Whole storages are copied, including memory that must not be read, which is NaN here too.
    monkeypatch.setattr(GuardedBlocks, "_protect", staticmethod(lambda pages, readable: None))
    monkeypatch.setattr(select, "lack_of_triton", lambda device: None)  # also engines with tensors on the CPU
    with OnDevice(DEVICE):
        yield


@pytest.fixture
def batch_invariant_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter's GEMMs, a row's last bits depend on its place in a tile on some CPUs; on GPUs they do not."""

    def multiply(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        found: np.ndarray = np.einsum("mk,kn->mn", a, b, dtype=dtype)
        return found

    monkeypatch.setattr(np, "matmul", multiply)
