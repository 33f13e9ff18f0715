"""Token sequences that must not appear in the output.

The tokens that would complete a bad word are found by walking backwards from the end of the output through a tree. The
tree holds all words without their last tokens, reversed. The walk is shorter than the longest word, independent of the
number of words.

    bad words  a b X,  b X,  c Y        tree   ├─ b: X ── a: X
    output     … a b                           └─ c: Y
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class _Node:
    """A node of the tree, which stands for the end of an output: `last` holds the tokens that complete a word after
    this end, `before` the children by the token before it."""

    last: list[int] = field(default_factory=list)
    before: dict[int, _Node] = field(default_factory=dict)


class BadWords:
    """The bad words of one request.

    Args:
        words: token sequences, none of them empty.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._root = _Node()
        for *begin, last in words:
            node = self._root
            for token in reversed(begin):
                node = node.before.setdefault(token, _Node())
            node.last.append(last)

    def completions(self, known: Sequence[int], num_prompt_tokens: int) -> list[int]:
        """Return the tokens that would complete a word in the output, which is `known` without the prompt."""
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
    """Return the tree of a request's bad words, cached so that all prompts of the request share it."""
    return BadWords(words)
