"""Bad words → token sequences, by vLLM's rules: each word at the start of a text, and in some cases after a space."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Protocol

from stoker_common.errors import RequestError

TokenSequence = tuple[int, ...]

#: Maximum number of lists of bad words whose token sequences are cached.
_CACHE_SIZE: Final = 64

#: Maximum number of a request's bad words, and of their token sequences.
MAX_BAD_WORDS = 1000


def spellings(words: Sequence[str]) -> list[str]:
    """Return the texts to encode for `sequences`: two per word.

    Raises:
        RequestError: there are too many words.
    """
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(f"there are {len(words)} bad_words; at most {MAX_BAD_WORDS} are allowed", "bad_words")
    return [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]


def sequences(words: Sequence[str], encoded: Sequence[Sequence[int]], vocab_size: int) -> tuple[TokenSequence, ...]:
    """Return the token sequences of words.

    Args:
        encoded: the token ids of the words' `spellings`, two lists per word.
        vocab_size: the model's number of tokens, which may be less than the tokenizer's.

    Raises:
        RequestError: a word has no tokens or a token outside the model's vocabulary, or there are too many sequences.
    """
    found: list[TokenSequence] = []
    for word, plain, spaced in zip(words, encoded[::2], encoded[1::2], strict=True):
        if not plain:
            raise RequestError(f"bad_words: {word!r} has no tokens", "bad_words")
        if max(*plain, *spaced) >= vocab_size:
            raise RequestError(f"bad_words: {word!r} has a token that the model does not have", "bad_words")
        found.append(tuple(plain))
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(tuple(spaced))
    if len(found) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words become {len(found)} token sequences; at most {MAX_BAD_WORDS} are allowed", "bad_words"
        )
    return tuple(found)


class Encoding(Protocol):
    """Encodes texts in the background."""

    async def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text."""
        ...


class BadWords:
    """Encodes bad words once for all prompts of a request, and caches them for later requests."""

    def __init__(self, tokenizer: Encoding, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._cache: OrderedDict[tuple[str, ...], asyncio.Task[tuple[TokenSequence, ...]]] = OrderedDict()

    async def encoded(self, words: tuple[str, ...]) -> tuple[TokenSequence, ...]:
        """Return the token sequences of words.

        Raises:
            RequestError: see `spellings` and `sequences`.
        """
        if not words:
            return ()
        if words not in self._cache:
            self._cache[words] = asyncio.create_task(self._encode(words))
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        task = self._cache[words]
        try:
            return await asyncio.shield(task)
        except Exception:
            if self._cache.get(words) is task:
                del self._cache[words]
            raise

    async def _encode(self, words: tuple[str, ...]) -> tuple[TokenSequence, ...]:
        encoded = await self._tokenizer.encode(spellings(words), add_special_tokens=False)
        return sequences(words, encoded, self._vocab_size)
