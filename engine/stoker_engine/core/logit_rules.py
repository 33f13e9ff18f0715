"""Changes of a request's logits, prepared once on arrival rather than in each step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from stoker_engine.core.bad_words import BadWords, bad_words_tree
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.token_counts import TokenCounts
from stoker_engine.core.token_ids import TokenIds


@dataclass(frozen=True, eq=False)
class LogitRules:
    """How the logits of a request are modified.

    Attributes:
        allowed: the only tokens that can be chosen; None: all.
        end_tokens: the stop tokens and the EOS tokens, which cannot be among the first ``min_tokens`` tokens; empty
            sets are omitted.
        bad_words: None: there are no bad words.
        bias_tokens, biases: int64 token ids, and the float64 values to add to their logits.
        repetition, frequency, presence: the penalties.
    """

    allowed: TokenIds | None
    end_tokens: tuple[TokenIds, ...]
    bad_words: BadWords | None
    bias_tokens: array[int]
    biases: array[float]
    repetition: float
    frequency: float
    presence: float

    @classmethod
    def of(cls, spec: EngineRequest) -> LogitRules | None:
        """Return the rules of a request, or None if it has none."""
        params = spec.params
        end_tokens: tuple[TokenIds, ...] = ()
        if params.min_tokens:
            eos = () if params.ignore_eos else spec.eos_token_ids
            end_tokens = tuple(ids for ids in (_as_ids(params.stop_token_ids), TokenIds(eos)) if len(ids))
        rules = cls(
            allowed=None if params.allowed_token_ids is None else _as_ids(params.allowed_token_ids),
            end_tokens=end_tokens,
            bad_words=bad_words_tree(spec.bad_words) if spec.bad_words else None,
            bias_tokens=array("q", params.logit_bias),
            biases=array("d", params.logit_bias.values()),
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
        )
        return rules if rules.is_lasting or end_tokens else None

    @property
    def is_lasting(self) -> bool:
        """Whether rules apply beyond the first ``min_tokens`` tokens."""
        return self.allowed is not None or self.bad_words is not None or len(self.biases) > 0 or self.is_penalised

    @property
    def is_penalised(self) -> bool:
        """Whether tokens in the prompt or output are penalized."""
        return self.repetition != 1 or self.frequency != 0 or self.presence != 0

    @property
    def reads_tokens(self) -> bool:
        """Whether the rules depend on the tokens of the prompt or output."""
        return self.bad_words is not None or self.is_penalised

    def counts(self, prompt: list[int]) -> TokenCounts | None:
        """Return the initial token counts of a sequence, or None without penalties. Only the repetition penalty
        includes the prompt."""
        return TokenCounts(prompt if self.repetition != 1 else []) if self.is_penalised else None


def _as_ids(token_ids: Sequence[int]) -> TokenIds:
    """Convert to `TokenIds`. A `TokenIds` is returned itself, so that a request's prompts share it and its cached
    mask."""
    return token_ids if isinstance(token_ids, TokenIds) else TokenIds(token_ids)
