"""Metadata of a row of logits for the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stoker_engine.core.logit_rules import LogitRules
from stoker_engine.core.sampling_params import RequestParams
from stoker_engine.core.token_counts import TokenCounts


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """How to choose tokens from a row of logits.

    Attributes:
        num_samples: number of next tokens to draw.
        seed: seed of the sampler; the random number of sample i depends only on (seed + i, position).
        known: all previous tokens; the first `num_prompt_tokens` are the prompt.
        rules: changes of the logits; None: none.
        counts: counts of the sequence's tokens, if penalties need them.
        may_end: whether the output has at least `min_tokens` tokens.
        num_candidates: number of most likely tokens for a beam; 0: not a beam.
        allowed: int32 [words], a bit for each token that the grammar allows; None: no grammar.
    """

    params: RequestParams
    seed: int
    known: Sequence[int]
    num_prompt_tokens: int
    num_samples: int = 1
    rules: LogitRules | None = None
    counts: TokenCounts | None = None
    may_end: bool = True
    num_candidates: int = 0
    allowed: np.ndarray | None = None
