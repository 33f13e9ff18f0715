"""Which experts of a layer a ``quantization_config`` may tell apart.

A large mixture has tens of thousands of matrices, and a plan in a webhook has no time to match the name of each. All
experts of a layer are stored alike, unless a name or a pattern speaks of some by their numbers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

#: Patterns may tell numbers apart by how many digits they have.
_ALWAYS: Final = (0, 1, 10, 100)
_LAYER: Final = re.compile(r"layers\.(\d{1,9})\.")
_EXPERTS: Final = re.compile(r"experts([^A-Za-z]*)")
_NUMBER: Final = re.compile(r"\d{1,9}")


@dataclass(frozen=True)
class NamedExperts:
    """Experts that stand for all of a layer.

    Attributes:
        everywhere: those that are named without a layer, or by a pattern.
        layers: those that are named together with a layer, by it.
    """

    everywhere: frozenset[int] = frozenset()
    layers: Mapping[int, frozenset[int]] | None = None

    @classmethod
    def of(cls, stated: Any) -> NamedExperts:
        """Of a parsed ``quantization_config``."""
        found: defaultdict[int | None, set[int]] = defaultdict(set)
        for text in _texts(stated):
            layer = _LAYER.search(text)
            for part in _EXPERTS.findall(text):
                found[None if layer is None else int(layer[1])] |= set(map(int, _NUMBER.findall(part)))
        everywhere = found.pop(None, set())
        # A number in a pattern may be the first digit of longer ones (``2[0-9]``).
        started = {number * tens for number in everywhere for tens in (1, 10, 100)}
        return cls(frozenset(started), {layer: frozenset(named) for layer, named in found.items() if layer is not None})

    def __call__(self, layer: int, count: int) -> Iterable[int]:
        """Those of `layer`, of its `count` experts, that stand for all: one that is named, and others beside it."""
        named = self.everywhere | (self.layers or {}).get(layer, frozenset())
        return sorted(number for number in {*_ALWAYS, count - 1, *named} if 0 <= number < count)


def first_expert(layer: int, count: int) -> Iterable[int]:
    """The first expert speaks for all."""
    return range(min(count, 1))


def _texts(value: Any) -> Iterator[str]:
    """All strings within, keys among them."""
    stack = [value]
    while stack:
        inner = stack.pop()
        if isinstance(inner, str):
            yield inner
        elif isinstance(inner, Mapping):
            stack += [*inner, *inner.values()]
        elif isinstance(inner, list | tuple):
            stack += inner
