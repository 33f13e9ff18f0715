"""Token sequences that must not be completed.

What would complete one is found by walking back from the end of the output, through a tree of all words but their
last tokens, read backwards: as many steps as the longest word has tokens, however many words there are.

    bad words  a b X,  b X,  c Y        tree   ├─ b: X ── a: X
    output     … a b                           └─ c: Y
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class _Node:
    """What completes the words whose beginnings end as the walk so far; and the token before."""

    last: list[int] = field(default_factory=list)
    before: dict[int, _Node] = field(default_factory=dict)


class BadWords:
    """The bad words of one request.

    Args:
        words: token sequences, none empty.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._root = _Node()
        for *begin, last in words:
            node = self._root
            for token in reversed(begin):
                node = node.before.setdefault(token, _Node())
            node.last.append(last)

    def completions(self, known: Sequence[int], num_prompt_tokens: int) -> list[int]:
        """Tokens that would complete a word in the output, the part of `known` behind the prompt."""
        found = list(self._root.last)
        node = self._root
        for index in range(len(known) - 1, num_prompt_tokens - 1, -1):
            following = node.before.get(known[index])
            if following is None:
                break
            node = following
            found += node.last
        return found


@functools.lru_cache(maxsize=8)
def bad_words_tree(words: tuple[tuple[int, ...], ...]) -> BadWords:
    """The bad words of a request, made once for all of its prompts: it never changes."""
    return BadWords(words)
