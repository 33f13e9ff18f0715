r"""Regular expressions for module names, with matching time bounded by the lengths of expressions and name.

`re` may need exponential time for an untrusted expression. The expressions in checkpoints are simple:

.*mlp.gate$                         letters; any character; any number of them; the end
model\.layers\.(0|1|2)\..*          one of several
.*\.(?:1[0-5])\.\d+                 sets, digits, and one or more of them
.*visual_?(head)?                   optional characters and groups

Groups are neither nested nor repeated. So an expression is a set of alternative sequences of single-character elements,
each of which may be optional, repeated, or both. All sequences of all expressions are matched simultaneously by a
bit-parallel automaton with one bit per element (Navarro and Raffinot, Flexible Pattern Matching in Strings, 2002,
section 4.2.2), which needs a few integer operations for each character of a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import product
from typing import Final

#: Maximum number of elements in all expressions of a list, after expanding alternatives. Real lists have some hundreds.
MOST_ELEMENTS: Final = 10_000

#: A single-character element with its quantifier. A lazy quantifier matches the same names.
_ELEMENT: Final = re.compile(r"(\\d|\\[^\w\s]|\[\^?-?[\w.]+(?:-[\w.]+)*-?\]|[^][\\(){}|*+?^$])(?:([*+?])\??)?")
_GROUP: Final = re.compile(r"\((?:\?:)?([^()]*)\)(\??)(?![*+?])")

#: Elements of a sequence: (expression for one character, its quantifier).
_Sequence = tuple[tuple[str, str], ...]


class NamePatterns:
    """Expressions that are matched against the start of names.

    Attributes:
        expressions: expressions in the subset of `re`'s syntax that the module's docstring describes.

    Raises:
        ValueError: an expression is invalid or not supported, or there are more than `MOST_ELEMENTS` elements; the
            argument is the expression.
    """

    def __init__(self, expressions: Iterable[str]) -> None:
        self.expressions = tuple(expressions)
        self._owners: dict[int, int] = {}
        self._starts = self._optional = self._repeated = 0
        self._anywhere = self._at_end = 0
        self._atoms: dict[str, int] = {}
        bits = 0
        for index, expression in enumerate(self.expressions):
            for sequence, ends in _alternatives(expression):
                bits += 1 + len(sequence)
                if bits > MOST_ELEMENTS:
                    raise ValueError(expression)
                self._add(index, sequence, ends, bits - len(sequence))
        self._mask = lru_cache(1024)(self._mask_of)
        self._next = lru_cache(4096)(self._next_of)
        self._first = self._closure(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamePatterns) and self.expressions == other.expressions

    def __hash__(self) -> int:
        return hash(self.expressions)

    def _add(self, index: int, sequence: _Sequence, ends: bool, first: int) -> None:
        """Add a sequence of expression `index`. Its elements get the bits from `first` on; the bit before is its
        start state."""
        self._starts |= 1 << (first - 1)
        for bit, (atom, times) in enumerate(sequence, first):
            self._atoms[atom] = self._atoms.get(atom, 0) | 1 << bit
            self._optional |= (times in ("*", "?")) << bit
            self._repeated |= (times in ("*", "+")) << bit
        last = 1 << (first + len(sequence) - 1)
        self._owners[last] = index
        if ends:
            self._at_end |= last
        else:
            self._anywhere |= last

    def first(self, name: str) -> int | None:
        """Return the index of the first expression that matches the start of `name`; None if none does."""
        states = self._first
        found = states & self._anywhere
        for character in name:
            if not states:
                break
            states = self._next(states, character)
            found |= states & self._anywhere
        found |= states & self._at_end
        return self._owners[found & -found] if found else None

    def _next_of(self, states: int, character: str) -> int:
        fits = self._mask(character)
        return self._closure((states << 1 | states & self._repeated) & fits)

    def _closure(self, states: int) -> int:
        """Return `states` and the states reachable by skipping optional elements. The carry of the addition propagates
        through consecutive optional elements."""
        skipped = states << 1 & self._optional
        return states | skipped | self._optional & ~(self._optional + skipped)

    def _mask_of(self, character: str) -> int:
        """Return the bits of the elements that match the character."""
        return sum(mask for atom, mask in self._atoms.items() if re.match(atom, character))


def _alternatives(expression: str) -> Iterator[tuple[_Sequence, bool]]:
    """Yield the sequences of an expression, and whether each must match up to the end of the name."""
    for branch in _branches(expression):
        ends = branch.endswith("$") and not branch.endswith("\\$")
        body = branch.removeprefix("^")
        for sequence in _sequences(body[:-1] if ends else body, expression):
            yield sequence, ends


def _branches(expression: str) -> list[str]:
    """Split an expression at each ``|`` outside of groups."""
    if len(expression) > MOST_ELEMENTS:
        raise ValueError(expression)
    branches, depth = [""], 0
    for piece in re.findall(r"\\.|.", expression, re.DOTALL):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            branches.append("")
        else:
            branches[-1] += piece
    return branches


def _sequences(body: str, expression: str) -> Iterator[_Sequence]:
    """Expand `body`, which has no ``|`` outside of groups, to its sequences."""
    parts: list[list[_Sequence]] = []
    start, count = 0, 1
    while start < len(body):
        if group := _GROUP.match(body, start):
            choices = [_plain(choice, expression) for choice in group[1].split("|")]
            parts.append([*choices, ()] if group[2] else choices)
            start = group.end()
        else:
            element, start = _element(body, start, expression)
            parts.append([(element,)])
        count *= len(parts[-1])
        if count > MOST_ELEMENTS:
            raise ValueError(expression)
    for choice in product(*parts):
        yield tuple(element for sequence in choice for element in sequence)


def _plain(choice: str, expression: str) -> _Sequence:
    """Parse a sequence without groups."""
    elements, start = [], 0
    while start < len(choice):
        element, start = _element(choice, start, expression)
        elements.append(element)
    return tuple(elements)


def _element(text: str, start: int, expression: str) -> tuple[tuple[str, str], int]:
    """Return the element at `start`, and the index after it."""
    match = _ELEMENT.match(text, start)
    if match is None:
        raise ValueError(expression)
    try:
        re.compile(match[1])
    except re.error:
        raise ValueError(expression) from None
    return (match[1], match[2] or ""), match.end()
