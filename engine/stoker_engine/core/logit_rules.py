"""What one request asks to be done to its logits: made when it comes, so that no step makes it again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stoker_engine.core.bad_words import BadWords
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.core.token_counts import TokenCounts
from stoker_engine.core.token_ids import Ids, TokenIds


@dataclass(frozen=True, eq=False)
class LogitRules:
    """How a request changes its logits.

    Attributes:
        allowed: [n] tokens beside which nothing can be chosen; None: all can be.
        end_tokens: [n] tokens that cannot be chosen before ``min_tokens``.
        bad_words: None where there are none.
        bias_tokens, biases: [n] int64 and [n] float64, what is added to which token's logit.
        repetition, frequency, presence: the penalties.
    """

    allowed: Ids | None
    end_tokens: Ids
    bad_words: BadWords | None
    bias_tokens: Ids
    biases: npt.NDArray[np.float64]
    repetition: float
    frequency: float
    presence: float

    @classmethod
    def of(cls, asked: EngineRequest) -> LogitRules | None:
        """The rules of a request; None: its logits stay as they are."""
        params = asked.params
        if not isinstance(params, SamplingParams):
            return None
        end_tokens = np.zeros(0, np.int64)
        if params.min_tokens:
            eos = () if params.ignore_eos else asked.eos_token_ids
            end_tokens = np.union1d(TokenIds(params.stop_token_ids).array, TokenIds(eos).array)
        rules = cls(
            allowed=None if params.allowed_token_ids is None else TokenIds(params.allowed_token_ids).array,
            end_tokens=end_tokens,
            bad_words=BadWords(asked.bad_words) if asked.bad_words else None,
            bias_tokens=np.array(list(params.logit_bias), dtype=np.int64),
            biases=np.array(list(params.logit_bias.values()), dtype=np.float64),
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
        )
        return rules if rules.is_lasting or len(end_tokens) else None

    @property
    def is_lasting(self) -> bool:
        """Whether they hold for every token, not only for the first ``min_tokens``."""
        return self.allowed is not None or self.bad_words is not None or len(self.biases) > 0 or self.is_penalised

    @property
    def is_penalised(self) -> bool:
        """Whether tokens that a sequence holds are penalised."""
        return self.repetition != 1 or self.frequency != 0 or self.presence != 0

    def counts(self, prompt: list[int]) -> TokenCounts | None:
        """What a sequence of this request counts, at its beginning; only repetition looks at the prompt."""
        return TokenCounts(prompt if self.repetition != 1 else []) if self.is_penalised else None
