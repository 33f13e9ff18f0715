"""Experts of a layer that a ``quantization_config`` may treat differently.

A large mixture of experts has tens of thousands of matrices, too many for a webhook to match each name. All experts of
a layer have the same format unless a name or pattern in the config selects some by number.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

#: Experts that are always checked (as is the last one): patterns may depend on the number of digits.
_ALWAYS: Final = (0, 1, 10, 100)
_LAYER: Final = re.compile(r"layers\.(\d{1,9})\.")
_EXPERTS: Final = re.compile(r"experts([^A-Za-z]*)")
_NUMBER: Final = re.compile(r"\d{1,9}")


@dataclass(frozen=True)
class NamedExperts:
    """Experts that are checked on behalf of all experts of a layer.

    Attributes:
        everywhere: experts named without a layer's index.
        layers: experts named together with a layer, by layer index; None: none.
    """

    everywhere: frozenset[int] = frozenset()
    layers: Mapping[int, frozenset[int]] | None = None

    @classmethod
    def of(cls, stated: Any) -> NamedExperts:
        """Collect the experts that a parsed ``quantization_config`` names."""
        found: defaultdict[int | None, set[int]] = defaultdict(set)
        for text in _texts(stated):
            layer = _LAYER.search(text)
            for part in _EXPERTS.findall(text):
                found[None if layer is None else int(layer[1])] |= set(map(int, _NUMBER.findall(part)))
        # A number in a pattern may be the leading digits of longer numbers (``2[0-9]``).
        named = {
            layer: frozenset(number * tens for number in numbers for tens in (1, 10, 100))
            for layer, numbers in found.items()
        }
        everywhere = named.pop(None, frozenset())
        return cls(everywhere, {layer: experts for layer, experts in named.items() if layer is not None})

    def __call__(self, layer: int, count: int) -> Iterable[int]:
        """Return the experts to check of `layer`, which has `count` experts: the named ones and some others."""
        named = self.everywhere | (self.layers or {}).get(layer, frozenset())
        return sorted(number for number in {*_ALWAYS, count - 1, *named} if 0 <= number < count)


def first_expert(layer: int, count: int) -> Iterable[int]:
    """Return only the first expert of a layer."""
    return range(min(count, 1))


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a nested value, including keys."""
    stack = [value]
    while stack:
        inner = stack.pop()
        if isinstance(inner, str):
            yield inner
        elif isinstance(inner, Mapping):
            stack += [*inner, *inner.values()]
        elif isinstance(inner, list | tuple):
            stack += inner
