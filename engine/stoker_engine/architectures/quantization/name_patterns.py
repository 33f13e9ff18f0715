r"""Regular expressions for names of modules, matched in time that their length bounds, whatever they are.

What `re` does with an expression may take for ever; and what checkpoints hold is simple:

.*mlp.gate$                         letters; any one character, any number of it; the end
model\.layers\.(0|1|2)\..*          one of several
.*\.(?:1[0-5])\.\d+                 sets, digits, and one or more of them
.*visual_?(head)?                   one or none

Groups are not within groups, nor repeated. So an expression is one of several sequences of single characters, each
once, optional, repeated, or both; and all sequences of all expressions are matched at once, a bit for each element
(Navarro and Raffinot, Flexible Pattern Matching in Strings, 2002, section 4.2.2): a few operations on integers of that
many bits, for each character of a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import product
from typing import Final

#: What all expressions of a list may hold of elements, alternatives written out. Real lists have some hundreds.
MOST_ELEMENTS: Final = 10_000

#: A single character, and how often it occurs; what only says which way to match is tried first does not matter.
_ELEMENT: Final = re.compile(r"(\\d|\\[^\w\s]|\[\^?-?[\w.]+(?:-[\w.]+)*-?\]|[^][\\(){}|*+?^$])(?:([*+?])\??)?")
_GROUP: Final = re.compile(r"\((?:\?:)?([^()]*)\)(\??)(?![*+?])")

#: A character, as `re` writes it, and how often.
_Sequence = tuple[tuple[str, str], ...]


class NamePatterns:
    """Expressions, each of which means the names that begin with what it matches.

    Attributes:
        expressions: in the syntax of `re`, as far as the module's docstring describes it.

    Raises:
        ValueError: one is none, or of another kind, or all are more than `MOST_ELEMENTS`; it holds that expression.
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
        """One sequence, whose elements are the bits from `first`; the one before is set where it begins."""
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
        """Which expression is the first that matches the beginning of `name`; None: none does."""
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
        """`states`, and those behind them past optional elements: a carry runs through a row of these."""
        skipped = states << 1 & self._optional
        return states | skipped | self._optional & ~(self._optional + skipped)

    def _mask_of(self, character: str) -> int:
        """The elements that are that character."""
        return sum(mask for atom, mask in self._atoms.items() if re.match(atom, character))


def _alternatives(expression: str) -> Iterator[tuple[_Sequence, bool]]:
    """The sequences of an expression, and whether the name ends with each."""
    for branch in _branches(expression):
        ends = branch.endswith("$") and not branch.endswith("\\$")
        body = branch.removeprefix("^")
        for sequence in _sequences(body[:-1] if ends else body, expression):
            yield sequence, ends


def _branches(expression: str) -> list[str]:
    """What stands between ``|`` outside of groups."""
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
    """The sequences that `body`, without ``|`` outside of groups, is short for."""
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
    """Elements without groups."""
    elements, start = [], 0
    while start < len(choice):
        element, start = _element(choice, start, expression)
        elements.append(element)
    return tuple(elements)


def _element(text: str, start: int, expression: str) -> tuple[tuple[str, str], int]:
    """The element at `start`, and where the next one is."""
    match = _ELEMENT.match(text, start)
    if match is None:
        raise ValueError(expression)
    try:
        re.compile(match[1])
    except re.error:
        raise ValueError(expression) from None
    return (match[1], match[2] or ""), match.end()
