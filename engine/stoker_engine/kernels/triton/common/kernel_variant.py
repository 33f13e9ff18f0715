"""Kernel variants: all that is needed to compile a kernel without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

#: Type of an absent element of a tuple: None.
ABSENT: Final = "constexpr"


@dataclass(frozen=True)
class KernelVariant:
    """A kernel, with arguments as in models.

    Attributes:
        kernel: the decorated function.
        signature: type of each argument in Triton's notation; ``constexpr`` for constants; for named tuples, the same
            tuple of types, `ABSENT` for elements that are None.
        constants: values of the constants; None for absent tensors.
        warps, stages: compile options.
        tensor_cores: whether the compiled code must use tensor cores.
    """

    name: str
    kernel: Any
    signature: Mapping[str, Any]
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
        tuples: Mapping[str, tuple[Any, ...]] | None = None,
    ) -> KernelVariant:
        """Return a variant of a kernel; arguments in none of the mappings are int64 (strides, sizes).

        Args:
            pointers: element types of tensors, by argument.
            numbers: types of scalars, by argument.
            tuples: named tuples of types, by argument.
        """
        tuples = tuples or {}

        def type_of(argument: str) -> Any:
            if argument in constants:
                return "constexpr"
            if argument in tuples:
                return tuples[argument]
            return f"*{pointers[argument]}" if argument in pointers else numbers.get(argument, "i64")

        signature = {each: type_of(each) for each in kernel.arg_names}
        return cls(name, kernel, signature, constants, warps, stages, tensor_cores)

    def elements(self) -> Iterator[tuple[tuple[int, ...], str, str]]:
        """Yield each argument and each element of a tuple: its indices, its name with the tuple's, and its type."""
        for index, (name, of) in enumerate(self.signature.items()):
            yield from _elements((index,), name, of)


def _elements(path: tuple[int, ...], name: str, of: Any) -> Iterator[tuple[tuple[int, ...], str, str]]:
    if not isinstance(of, tuple):
        yield path, name, of
        return
    for index, (field, element) in enumerate(zip(of._fields, of, strict=True)):  # type: ignore[attr-defined]
        yield from _elements((*path, index), f"{name}.{field}", element)
