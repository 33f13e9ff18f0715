"""Has kernels compiled, for a GPU that need not be here, instead of launched.

Inside, the operations of `kernels.triton` take fake tensors (torch's FakeTensorMode), which have a shape and a place
and no numbers. Their host functions run as always. What they would launch is specialised and compiled as it would be
with real tensors, and lands in Triton's cache under the same name; so whoever computes the same later finds it there.
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

#: Is given a kernel that is launched, as it was before it was decorated, and what it is specialised for.
OnLaunch = Callable[[Callable[..., Any], str], None]


class HostFunctions(TorchDispatchMode):
    """Runs our operations' host functions on fake tensors too, which torch would only ask for the results' shapes; and
    pins them, which torch refuses."""

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
    """Compiles what is launched inside, on fake tensors; nothing runs.

    Args:
        target: what for.
        on_launch: is told instead, and nothing is compiled.
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
    """Stands for the one of a GPU, as far as compiling asks."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return f"{self._target.backend} {self._target.arch}"  # compiled kernels are kept by device

    def get_current_stream(self, device: object) -> int:
        return 0


class _Tensor:
    """What Triton looks at of a tensor when it specialises a kernel."""

    def __init__(self, fake: FakeTensor) -> None:
        self.dtype = fake.dtype
        self._begins = int(fake.storage_offset()) * fake.itemsize
        self._bytes = int(fake.untyped_storage().nbytes())

    def data_ptr(self) -> int:
        return self._begins  # storage begins at a multiple of far more than what is looked at

    def ptr_range(self) -> int:
        return self._bytes


def _stand_in(argument: Any) -> Any:
    return _Tensor(argument) if isinstance(argument, FakeTensor) else argument
