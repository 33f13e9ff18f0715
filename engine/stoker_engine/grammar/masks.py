"""Computes the allowed next tokens of many sequences at once. Releases the GIL."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stoker_engine.grammar.matcher import Matcher

if TYPE_CHECKING:
    from llguidance import LLExecutor


@dataclass(frozen=True)
class Mask:
    """The allowed next tokens of one sequence.

    Attributes:
        allowed: int32 [words], one bit per token, set if it is allowed, least significant bit first; None: all
            tokens, unless `error` is set.
        error: why the sequence cannot continue; None: it can.
    """

    allowed: np.ndarray | None = None
    error: str | None = None


#: Mask that allows all tokens.
FREE = Mask()


class Masks:
    """Computes masks.

    Args:
        vocab_size: number of logits per row.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._num_words = -(-vocab_size // 32)
        self._no_eos = _bits(range(vocab_size), self._num_words) & ~_bits(eos_token_ids, self._num_words)
        self._executor: LLExecutor | None = None

    def compute(self, matchers: Sequence[Matcher], ignores_eos: Sequence[bool]) -> list[Mask]:
        """Return the mask of each matcher.

        Args:
            matchers: distinct matchers.
            ignores_eos: for each matcher, whether end-of-sequence is only allowed if no other token is.
        """
        started = [matcher for matcher in matchers if matcher.has_started]
        allowed = np.zeros((len(started), self._num_words), dtype=np.int32)
        if started:
            pairs = [(matcher.matcher, index) for index, matcher in enumerate(started)]
            self._threads().unsafe_compute_mask_ptr(pairs, allowed.ctypes.data, self._num_words * 4, len(started))
        of_started = iter(allowed)
        return [
            self._mask(matcher, next(of_started) if matcher.has_started else None, ignores)
            for matcher, ignores in zip(matchers, ignores_eos, strict=True)
        ]

    def _mask(self, matcher: Matcher, allowed: np.ndarray | None, ignores_eos: bool) -> Mask:
        if allowed is None:
            return Mask(self._no_eos) if ignores_eos else FREE
        if (error := matcher.error) is not None:
            return Mask(error=error)
        if ignores_eos and (without_eos := allowed & self._no_eos).any():
            return Mask(without_eos)
        return Mask(allowed)

    def _threads(self) -> LLExecutor:
        from llguidance import LLExecutor

        self._executor = self._executor or LLExecutor(num_threads=_num_threads())
        return self._executor


def _bits(token_ids: Iterable[int], num_words: int) -> np.ndarray:
    """Return int32 [words] with the bits of the tokens set."""
    bits = np.zeros(num_words * 32, dtype=bool)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def _num_threads() -> int:
    """Return the number of threads: few, because they compete with a model on the CPU."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4))
