"""A kernel and what it is compiled for, so that it can be compiled where there is no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelVariant:
    """A kernel as some model needs it.

    Attributes:
        kernel: the decorated function.
        signature: each argument's type, as Triton writes it; ``constexpr`` where it is a constant.
        constants: the values of these; None: there is no such tensor.
        tensor_cores: whether its code must have instructions of tensor cores.
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
        """Of a kernel whose other arguments are strides.

        Args:
            pointers: what tensors hold, by argument.
            numbers: the types of scalars, by argument.
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
