"""Bad words → token sequences: at the beginning of a text and, where that differs, after a space."""

from __future__ import annotations

from collections.abc import Sequence

from stoker_engine.contract.errors import RequestError

TokenSequence = tuple[int, ...]

#: Most bad words, and most token sequences that they may become: each is looked for at every step.
MAX_BAD_WORDS = 1000


def spellings(words: Sequence[str]) -> list[str]:
    """The texts whose tokens `sequences` needs: two for each word.

    Raises:
        RequestError: there are too many words.
    """
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(f"there are {len(words)} bad_words; at most {MAX_BAD_WORDS} are taken", "bad_words")
    return [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]


def sequences(words: Sequence[str], encoded: Sequence[Sequence[int]], vocab_size: int) -> tuple[TokenSequence, ...]:
    """The token sequences of words.

    Args:
        encoded: the tokens of their `spellings`.
        vocab_size: of the model, which may have fewer tokens than the tokenizer.

    Raises:
        RequestError: a word has no tokens, or one that the model lacks, or there are too many sequences.
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
            f"bad_words become {len(found)} token sequences; at most {MAX_BAD_WORDS} are taken", "bad_words"
        )
    return tuple(found)
