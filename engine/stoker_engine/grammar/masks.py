"""Which tokens may come next, for many sequences at once; other threads run meanwhile."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stoker_engine.grammar.matcher import Matcher

if TYPE_CHECKING:
    from llguidance import LLExecutor


@dataclass(frozen=True)
class Mask:
    """What may come next in one sequence.

    Attributes:
        forbidden: bool [vocabulary], tokens that may not; None: any may.
        error: why none may, so that the sequence has no next token; None: some may.
    """

    forbidden: np.ndarray | None = None
    error: str | None = None


#: Where any token may come.
FREE = Mask()


class Masks:
    """Computes masks.

    Args:
        vocab_size: how many logits a row has.
        eos_token_ids: tokens that end an output.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos = np.array(eos_token_ids, dtype=np.int64)
        self._executor: LLExecutor | None = None

    def compute(self, matchers: Sequence[Matcher], ignores_eos: Sequence[bool]) -> list[Mask]:
        """What may come next in each sequence.

        Args:
            matchers: a different one for each.
            ignores_eos: whether it does not end before nothing else can come.
        """
        begun = [matcher for matcher in matchers if matcher.has_begun]
        allowed = np.full((len(begun), -(-self._vocab_size // 32)), 0, dtype=np.int32)
        if begun:
            pairs = [(matcher.matcher, place) for place, matcher in enumerate(begun)]
            self._threads().unsafe_compute_mask_ptr(pairs, allowed.ctypes.data, allowed.shape[1] * 4, len(begun))
        forbidden = np.unpackbits(
            np.invert(allowed, out=allowed).view(np.uint8), axis=1, count=self._vocab_size, bitorder="little"
        ).view(bool)
        of_begun = iter(forbidden)
        masks: list[Mask] = []
        for matcher, ignores in zip(matchers, ignores_eos, strict=True):
            if matcher.has_begun:
                row = next(of_begun)
                if (error := matcher.error) is not None:
                    masks.append(Mask(error=error))
                    continue
                if ignores:
                    row[self._eos] = True
                    if row.all():
                        row[self._eos] = False
                masks.append(Mask(row))
            elif ignores:
                row = np.zeros(self._vocab_size, dtype=bool)
                row[self._eos] = True
                masks.append(Mask(row))
            else:
                masks.append(FREE)
        return masks

    def _threads(self) -> LLExecutor:
        from llguidance import LLExecutor

        self._executor = self._executor or LLExecutor(num_threads=_num_threads())
        return self._executor


def _num_threads() -> int:
    """Few: what they take is taken from the model where that runs on the CPU."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4))
