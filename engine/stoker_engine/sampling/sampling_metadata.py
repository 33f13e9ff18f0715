"""What the sampler must know of a row of logits, to choose the token that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stoker_engine.core.logit_rules import LogitRules
from stoker_engine.core.sampling_params import RequestParams
from stoker_engine.core.token_counts import TokenCounts


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """One row, and how to choose by it.

    Attributes:
        num_samples: how many next tokens to draw.
        seed: of the sampler, which draws sample i by (seed + i, position) alone.
        known: all tokens before, the first `num_prompt_tokens` of them the prompt's.
        rules: what its request asks to be done to its logits; None: nothing.
        counts: the tokens it holds, where they are penalised.
        may_end: whether it has the tokens that it must have before it ends (min_tokens).
        num_candidates: of a beam: how many likeliest next tokens are wanted.
        allowed: int32 [words], a bit for each token that its grammar continues with; None: it has none.
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
