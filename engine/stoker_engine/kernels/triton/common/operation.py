"""Registration of kernels' host functions as torch operators, so that fake tensors and dispatch modes work with them.

Outside of a dispatch mode the function is called directly: torch's overhead for a custom Python operator is several
microseconds, and a step has hundreds of operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch._library.custom_ops import CustomOpDef
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Operation(Generic[Parameters, Result]):
    """A function that launches kernels.

    Attributes:
        operator: the registered torch operator.
    """

    def __init__(self, function: Callable[Parameters, Result], operator: CustomOpDef) -> None:
        self._function, self.operator = function, operator
        self.__doc__ = function.__doc__

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if is_in_torch_dispatch_mode():
            result: Result = self.operator(*args, **kwargs)
            return result
        return self._function(*args, **kwargs)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register a function that returns results of the right shapes and dtypes, without computing them."""
        return self.operator.register_fake(function)


def operation(
    name: str, mutates_args: Sequence[str] = ()
) -> Callable[[Callable[Parameters, Result]], Operation[Parameters, Result]]:
    """Return a decorator that makes a function an `Operation`.

    Args:
        name: qualified name of the torch operator.
        mutates_args: names of the arguments that the function writes to.
    """
    return lambda function: Operation(function, torch.library.custom_op(name, mutates_args=mutates_args)(function))
