"""Kernel variants: all that is needed to compile a kernel without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelVariant:
    """A kernel, with arguments as in models.

    Attributes:
        kernel: the decorated function.
        signature: type of each argument in Triton's notation; ``constexpr`` for constants.
        constants: values of the constants; None for absent tensors.
        warps, stages: compile options.
        tensor_cores: whether the compiled code must use tensor cores.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    warps: int
    stages: int
    tensor_cores: bool

    @classmethod
    def of(
        cls,
        name: str,
        kernel: Any,
        pointers: Mapping[str, str],
        numbers: Mapping[str, str],
        constants: Mapping[str, object],
        warps: int = 4,
        stages: int = 2,
        tensor_cores: bool = False,
    ) -> KernelVariant:
        """Return a variant of a kernel; arguments in none of the mappings are int64 (strides, sizes).

        Args:
            pointers: element types of tensors, by argument.
            numbers: types of scalars, by argument.
        """
        signature = {
            each: "constexpr"
            if each in constants
            else f"*{pointers[each]}"
            if each in pointers
            else numbers.get(each, "i64")
            for each in kernel.arg_names
        }
        return cls(name, kernel, signature, constants, warps, stages, tensor_cores)
