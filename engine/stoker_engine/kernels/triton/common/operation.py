"""Kernels' host functions as operators of torch, so that tensors without numbers, and tests, can stand in for tensors.

Where nobody stands in, the function is called straight: what torch does around a custom operator of Python takes the
host several microseconds, of which a step has hundreds.
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
        operator: the same, as torch has it.
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
        """Says what results are like, without computing them."""
        return self.operator.register_fake(function)


def operation(
    name: str, mutates_args: Sequence[str] = ()
) -> Callable[[Callable[Parameters, Result]], Operation[Parameters, Result]]:
    """Makes a function an operator.

    Args:
        mutates_args: names of the arguments that it writes into.
    """
    return lambda function: Operation(function, torch.library.custom_op(name, mutates_args=mutates_args)(function))
