"""Sampling parameters of a request, with vLLM's and OpenAI's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, Self

from stoker_common.errors import RequestError
from stoker_engine.core.beam_search import BeamSearch
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.core.token_ids import NO_TOKENS, TokenIds

#: Maximum number of sequences per request; each takes a row of the batch.
MAX_N = 128

#: Maximum length of a stop string or a bad word, in characters.
MAX_WORD_LENGTH = 4096

#: Maximum total length of a request's bad words, in characters; the engine keeps all their tokens.
MAX_BAD_WORDS_LENGTH = 16_384

#: Maximum number of entries in logit_bias; OpenAI's limit.
MAX_LOGIT_BIAS = 300

#: Maximum of (number of `stop_token_ids` + 1) × number of beams: each beam offers about as many next tokens.
MAX_CANDIDATES = 1024


class BaseParams:
    """Interface of the parameters of any kind of request for the engine.

    The defaults here describe a request that generates nothing: a single sequence whose prompt is computed. Subclasses
    override what their requests can set, by fields or properties. The defaults are class attributes and are not
    serialized. `SamplingParams` documents the other attributes.

    Attributes:
        seed: 0, because nothing is drawn.
        max_tokens: 1, because the engine reserves one token after each prompt.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = MappingProxyType({})
    allowed_token_ids: Sequence[int] | None = None
    bad_words: tuple[str, ...] = ()
    seed: int | None = 0
    max_tokens: int | None = 1
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = NO_TOKENS
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    visible_special_tokens: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def n(self) -> int:
        """Number of sequences returned for the prompt."""
        return 1

    @property
    def num_wanted(self) -> int | None:
        """Maximum number of returned tokens per sequence; None: up to the model's length."""
        return 0

    @property
    def is_greedy(self) -> bool:
        """Whether each next token is the most likely one."""
        return False

    @property
    def num_in_lockstep(self) -> int:
        """Number of sequences that must fit the batch and the KV cache at once; 0: each is scheduled independently."""
        return 0

    def new_beams(self, max_tokens: int, eos_token_ids: frozenset[int]) -> BeamSearch | None:
        """Return a beam search that has not started; None: the sequences are independent.

        Args:
            max_tokens: number of generated tokens at which every beam ends.
            eos_token_ids: tokens that end a beam, in addition to `stop_token_ids`.
        """
        return None

    def scoring_only(self) -> Self:
        """Return parameters that compute the prompt and discard the token after it, if this kind supports that; else
        these parameters."""
        return self

    def with_structured_outputs(self, outputs: StructuredOutputs | None) -> Self:
        """Return these parameters with the constraint `outputs`; None: without a constraint.

        Raises:
            RequestError: this kind of request cannot have a constraint.
        """
        if outputs is not None:
            raise RequestError("structured_outputs is not supported for this kind of request", "structured_outputs")
        return self


@dataclass(frozen=True)
class SamplingParams(BaseParams):
    """Sampling parameters of one request.

    Attributes:
        n: number of sequences generated for the prompt.
        temperature: divisor of the logits; 0 is greedy.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: keep this many of the most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens with at least this fraction of the most likely one's probability; 0 keeps all.
        presence_penalty: subtracted from the logit of each token in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        repetition_penalty: positive logits of tokens in prompt or output are divided by it, negative ones multiplied.
        logit_bias: value to add to the logit, by token id; at most `MAX_LOGIT_BIAS` entries.
        allowed_token_ids: the only tokens that can be chosen.
        bad_words: words that must not appear in the output.
        seed: makes the output reproducible, alone or in any batch; None: a random seed.
        max_tokens: maximum number of generated tokens; None: up to the model's length.
        min_tokens: minimum number of generated tokens; fewer if only tokens that end the output are allowed.
        stop: strings that end the output.
        include_stop_str_in_output: whether the stop string or stop token is part of the text.
        stop_token_ids: tokens that end the output.
        ignore_eos: continue past the model's end-of-sequence token; with a grammar, unless only this token is allowed.
        skip_special_tokens: remove special tokens from the text.
        visible_special_tokens: special tokens that stay in the text nevertheless, because a parser of the text needs
            them.
        logprobs: return the log-probability of each output token and of this many most likely ones (-1: all), from the
            model's own distribution before any of the changes above.
        prompt_logprobs: like `logprobs`, for the prompt's tokens.
        truncate_prompt_tokens: keep only this many last tokens of the prompt (-1: as many as the model accepts).
        structured_outputs: constraint on the output; None: unconstrained.
        only_scores: the only generated token is discarded, so the prompt may have the model's full length.

    Raises:
        RequestError: a value is out of range; `param` names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = NO_TOKENS
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    visible_special_tokens: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = None
    only_scores: bool = False

    @property
    def num_wanted(self) -> int | None:
        """See `BaseParams.num_wanted`."""
        return 0 if self.only_scores else self.max_tokens

    @property
    def is_greedy(self) -> bool:
        """See `BaseParams.is_greedy`."""
        return self.temperature == 0

    def scoring_only(self) -> Self:
        """See `BaseParams.scoring_only`."""
        return replace(self, only_scores=True)

    def with_structured_outputs(self, outputs: StructuredOutputs | None) -> Self:
        """See `BaseParams.with_structured_outputs`."""
        return replace(self, structured_outputs=outputs)

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _strings(getattr(self, name)))
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} tokens; at most {MAX_LOGIT_BIAS} are allowed", "logit_bias"
            )
        object.__setattr__(self, "logit_bias", {int(token): float(bias) for token, bias in self.logit_bias.items()})
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids, "stop_token_ids"))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _token_ids(self.allowed_token_ids, "allowed_token_ids"))
        self._check_ranges()
        for name in ("stop", "bad_words"):
            if any(len(word) > MAX_WORD_LENGTH for word in getattr(self, name)):
                raise RequestError(f"{name}: a string must have at most {MAX_WORD_LENGTH} characters", name)
        if (length := sum(map(len, self.bad_words))) > MAX_BAD_WORDS_LENGTH:
            raise RequestError(
                f"bad_words have {length} characters in total; at most {MAX_BAD_WORDS_LENGTH} are allowed", "bad_words"
            )
        if not all(self.stop):
            raise RequestError("stop must not contain an empty string", "stop")
        if not all(word.strip() for word in self.bad_words):
            raise RequestError("bad_words must not contain an empty word", "bad_words")
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise RequestError("allowed_token_ids is empty: no token could be chosen", "allowed_token_ids")
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise RequestError(
                f"structured_outputs must be a StructuredOutputs object, got {type(self.structured_outputs).__name__}; "
                "convert a dict by StructuredOutputs(**fields)",
                "structured_outputs",
            )
        if self.structured_outputs is not None and self.allowed_token_ids is not None:
            raise RequestError(
                "allowed_token_ids cannot be combined with structured_outputs, response_format or strict tools: "
                "together they may allow no token; send one of them",
                "allowed_token_ids",
            )
        if not all(-100 <= bias <= 100 for bias in self.logit_bias.values()):
            raise RequestError("logit_bias values must be between -100 and 100", "logit_bias")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", "min_tokens"
            )

    def _check_ranges(self) -> None:
        def check(name: str, fine: bool, range_: str) -> None:
            if not fine:
                raise RequestError(f"{name} must be {range_}, got {getattr(self, name)}", name)

        check("n", 1 <= self.n <= MAX_N, f"1 to {MAX_N}")
        check("temperature", 0 <= self.temperature < float("inf"), "finite and at least 0")
        check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        check("top_k", self.top_k >= -1, "-1 or 0 (all) or at least 1")
        check("min_p", 0 <= self.min_p <= 1, "0 to 1")
        check("presence_penalty", -2 <= self.presence_penalty <= 2, "-2 to 2")
        check("frequency_penalty", -2 <= self.frequency_penalty <= 2, "-2 to 2")
        check("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "finite and above 0")
        check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        check("only_scores", not self.only_scores or self.max_tokens == 1, "false unless max_tokens is 1")
        check("min_tokens", self.min_tokens >= 0, "at least 0")
        check("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a signed 64-bit integer")
        check("logprobs", self.logprobs is None or self.logprobs >= -1, "at least 0, or -1 for all")
        check(
            "prompt_logprobs", self.prompt_logprobs is None or self.prompt_logprobs >= -1, "at least 0, or -1 for all"
        )
        truncate = self.truncate_prompt_tokens
        check("truncate_prompt_tokens", truncate is None or truncate == -1 or truncate >= 1, "-1 or at least 1")


@dataclass(frozen=True)
class BeamSearchParams(BaseParams):
    """Beam search: the most likely sequences instead of sampled ones, by the rules of Hugging Face transformers.

    Attributes:
        beam_width: number of beams kept at each step, and of sequences returned.
        max_tokens: maximum number of generated tokens; None: up to the model's length.
        ignore_eos: continue past the model's end-of-sequence token.
        length_penalty: exponent of the length in a finished beam's score, log-probability ÷ length ** length_penalty.
        early_stopping: True stops once `beam_width` beams are finished; False also requires that no running beam, at
            its present length, scores above the worst of these; "never" requires that no running beam can ever do so.
        stop_token_ids: tokens that end a beam like the end-of-sequence token.
        skip_special_tokens, visible_special_tokens, truncate_prompt_tokens: see `SamplingParams`.

    Raises:
        RequestError: a value is out of range; `param` names it.
    """

    beam_width: int
    max_tokens: int | None = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: Sequence[int] = NO_TOKENS
    skip_special_tokens: bool = True
    visible_special_tokens: frozenset[int] = frozenset()
    truncate_prompt_tokens: int | None = None

    @property
    def num_wanted(self) -> int | None:
        """See `BaseParams.num_wanted`."""
        return self.max_tokens

    @property
    def n(self) -> int:
        """See `BaseParams.n`."""
        return self.beam_width

    @property
    def num_in_lockstep(self) -> int:
        """See `BaseParams.num_in_lockstep`."""
        return self.beam_width

    def new_beams(self, max_tokens: int, eos_token_ids: frozenset[int]) -> BeamSearch:
        """See `BaseParams.new_beams`."""
        end_tokens = eos_token_ids | frozenset(self.stop_token_ids)
        return BeamSearch(self.beam_width, max_tokens, end_tokens, self.length_penalty, self.early_stopping)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids, "stop_token_ids"))
        if not 1 <= self.beam_width <= MAX_N:
            raise RequestError(f"the beam width must be 1 to {MAX_N}, got {self.beam_width}", "n")
        if (1 + len(self.stop_token_ids)) * self.beam_width > MAX_CANDIDATES:
            raise RequestError(
                f"{self.beam_width} beams take at most {MAX_CANDIDATES // self.beam_width - 1} stop_token_ids, "
                f"got {len(self.stop_token_ids)}",
                "stop_token_ids",
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {self.max_tokens}", "max_tokens")
        if not -10 <= self.length_penalty <= 10:
            raise RequestError(f"length_penalty must be -10 to 10, got {self.length_penalty}", "length_penalty")
        truncate = self.truncate_prompt_tokens
        if truncate is not None and truncate != -1 and truncate < 1:
            raise RequestError("truncate_prompt_tokens must be -1 or at least 1", "truncate_prompt_tokens")


#: The parameters of a request.
RequestParams = SamplingParams | BeamSearchParams


def _token_ids(token_ids: Sequence[int], name: str) -> TokenIds:
    try:
        return TokenIds(token_ids)
    except (TypeError, ValueError, OverflowError):
        raise RequestError(f"{name} must be a list of token ids", name) from None


def _strings(value: str | tuple[str, ...] | list[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
