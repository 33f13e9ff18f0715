"""A pytest plugin (``-p``): the tests use Arm's kernels, run by qemu in another process.

The testing process is an ordinary one. Its heap lies in memory shared by both, at the same address (`heap.c`, which
must be preloaded), so that the emulated kernels (`guest.cpp`) can use tensors' addresses.

Environment:
    STOKER_GUEST: the program built from `guest.cpp`, and
    STOKER_GUEST_LIBRARY: the kernels, both built for aarch64.
    PYTHONMALLOC: must be ``malloc``, so that ctypes' objects lie in the heap as well.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stoker_engine.kernels.cpu import isa, library

QEMU = "qemu-aarch64-static"
#: Libraries of Debian's cross compiler for such programs.
SYSTEM = "/usr/aarch64-linux-gnu"
#: Address of the heap, as in shared.h.
HEAP = 0x200000000000


class _Call(ctypes.Structure):
    """`Call` of shared.h."""

    _fields_ = (
        ("name", ctypes.c_char * 64),
        ("integers", ctypes.c_long * 24),
        ("floats", ctypes.c_float * 8),
        ("result", ctypes.c_long),
    )


class Emulated:
    """Replaces a `ctypes.CDLL`: its functions run in the other process, one at a time.

    Raises:
        RuntimeError: by a function: the other process has ended, for example because of a stray read.
    """

    def __init__(self) -> None:
        file = ctypes.c_int.in_dll(ctypes.CDLL(None), "stoker_heap_file").value
        self._process = subprocess.Popen(
            [QEMU, "-L", SYSTEM, os.environ["STOKER_GUEST"], os.environ["STOKER_GUEST_LIBRARY"], str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(file,),
            env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
            bufsize=0,
        )
        self._call = _Call.from_address(HEAP)
        self._one_at_a_time = threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name not in library._ARGUMENTS:
            raise AttributeError(name)
        types = library._ARGUMENTS[name]

        def function(*arguments: Any) -> int:
            typed = list(zip(types, arguments, strict=True))
            integers = [_address(each) for kind, each in typed if kind is not ctypes.c_float]
            return self.call(name, integers, [each for kind, each in typed if kind is ctypes.c_float])

        setattr(self, name, function)
        return function

    def call(self, name: str, integers: list[int], floats: Sequence[float] = ()) -> int:
        """Call a function of the other process."""
        with self._one_at_a_time:
            self._call.name = name.encode()
            self._call.integers[: len(integers)] = integers
            self._call.floats[: len(floats)] = floats
            if not self._returned():
                raise RuntimeError(f"{name} found that the process that emulates has ended: {self._process.wait()}")
            return int(self._call.result)

    def _returned(self) -> bool:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(b"!")
        except BrokenPipeError:
            return False
        return self._process.stdout.read(1) == b"!"


def _address(argument: Any) -> int:
    """Convert an argument like `ctypes`: an integer, or the address of an object."""
    if argument is None:
        return 0
    if isinstance(argument, int):
        return argument
    if isinstance(argument, ctypes.c_void_p):
        return argument.value or 0
    return ctypes.addressof(argument._obj if hasattr(argument, "_obj") else argument)


_NEON = isa.Isa("neon", (), frozenset())
_emulated = Emulated()


def _load(isa: isa.Isa) -> Emulated:
    assert isa is _NEON
    _emulated.stoker_use_threads(torch.get_num_threads())
    return _emulated


isa._ISAS = dict.fromkeys(isa._ISAS, (_NEON,))  # type: ignore[attr-defined]
library.load = _load  # type: ignore[assignment]
library.library = functools.cache(lambda: _emulated)  # type: ignore[assignment]


# Mapped files are copied to the heap. Memory that must not be read (guarded_cache.py) also lies there, and is
# protected in both processes.
def _pages(file: int, length: int, **options: Any) -> Any:
    content = b"" if file == -1 else os.pread(file, os.fstat(file).st_size, 0)
    length = length or len(content)
    pages = (ctypes.c_char * length).from_address(_aligned(mmap.PAGESIZE, length))
    ctypes.memmove(pages, content, len(content))
    return pages


_aligned = ctypes.CDLL(None).aligned_alloc
_aligned.argtypes, _aligned.restype = (ctypes.c_size_t, ctypes.c_size_t), ctypes.c_void_p
mmap.mmap = _pages  # type: ignore[assignment,misc]


def pytest_collection_finish() -> None:
    """Protect memory in the other process like in this one."""
    for module in [module for name, module in sys.modules.items() if name.endswith("guarded_cache")]:
        protect_here = module.GuardedBlocks._protect

        def protect(pages: torch.Tensor, readable: bool, protect_pages: Callable[..., None] = protect_here) -> None:
            protect_pages(pages, readable)
            access = mmap.PROT_READ | mmap.PROT_WRITE if readable else 0
            assert _emulated.call("mprotect", [pages.data_ptr(), pages.numel(), access]) == 0

        module.GuardedBlocks._protect = staticmethod(protect)
