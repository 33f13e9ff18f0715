"""Compiles kernels instead of launching them, for a GPU that this machine need not have.

In this context the operations of `kernels.triton` accept fake tensors (torch's FakeTensorMode), which have a shape and
a device but no data. Their host functions run as usual. Kernels that these would launch are specialised and compiled as
with real tensors, and stored in Triton's cache under the same key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import triton
from torch._library import custom_ops
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

#: Called with the undecorated function of a kernel and its specialization key.
OnLaunch = Callable[[Callable[..., Any], str], None]


class HostFunctions(TorchDispatchMode):
    """Runs the host functions of Stoker's operations on fake tensors, where torch would call the fake implementations;
    and ignores pinning, which torch rejects for fake tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._opname == "_pin_memory":
            return args[0]
        if func.namespace != "stoker":
            return func(*args, **(kwargs or {}))
        operation = custom_ops._maybe_get_opdef(func)
        assert operation is not None
        with self:
            return operation._init_fn(*args, **(kwargs or {}))


@contextmanager
def compile_only(target: GPUTarget, on_launch: OnLaunch | None = None) -> Iterator[None]:
    """Compile the kernels that are launched in this context on fake tensors, without running them.

    Args:
        target: GPU to compile for.
        on_launch: called instead of compiling, for each launch of a kernel that this process has not compiled.
    """
    run, compile_ = JITFunction.run, JITFunction._do_compile

    def compile_instead(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *map(_stand_in, args), grid=grid, warmup=True, **kwargs)

    def tell(self: JITFunction[Any], key: str, *_: Any) -> None:
        assert on_launch is not None
        on_launch(self.fn, key)

    triton.runtime.driver.set_active(_Driver(target))
    JITFunction.run = compile_instead
    if on_launch is not None:
        JITFunction._do_compile = tell
    try:
        with HostFunctions():  # type: ignore[no-untyped-call]
            yield
    finally:
        JITFunction.run, JITFunction._do_compile = run, compile_
        triton.runtime.driver._active = None


class _Driver:
    """Stand-in for a GPU's driver, with the methods that compilation needs."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return f"{self._target.backend} {self._target.arch}"  # key of the per-device cache of compiled kernels

    def get_current_stream(self, device: object) -> int:
        return 0


class _Tensor:
    """Properties of a tensor by which Triton specialises a kernel."""

    def __init__(self, fake: FakeTensor) -> None:
        self.dtype = fake.dtype
        self._begins = int(fake.storage_offset()) * fake.itemsize
        self._bytes = int(fake.untyped_storage().nbytes())

    def data_ptr(self) -> int:
        return self._begins  # a storage is aligned to more than specialization checks

    def ptr_range(self) -> int:
        return self._bytes


def _stand_in(argument: Any) -> Any:
    if isinstance(argument, tuple) and hasattr(argument, "_fields"):
        return type(argument)(*map(_stand_in, argument))
    return _Tensor(argument) if isinstance(argument, FakeTensor) else argument
