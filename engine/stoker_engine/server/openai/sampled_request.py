"""Fields that completions and chats share: sampling and output options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from pydantic import model_validator

from stoker_common.errors import RequestError
from stoker_engine.server.fields.field_types import (
    BadWords,
    CacheSalt,
    Count,
    CountOrAll,
    CountOrZero,
    Int64,
    LogitBias,
    Metadata,
    RequestId,
    Stop,
    StrictModel,
    TokenIds,
    Width,
)
from stoker_engine.server.fields.unsupported import Off
from stoker_engine.server.openai.response_format import Formatted
from stoker_engine.server.openai.unsupported import Unsupported

#: Fields with the same name in `SamplingParams`.
_SAMPLING: Final = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "bad_words",
    "allowed_token_ids",
)

#: Fields that beam search does not support, with their neutral values. Beam search selects the likeliest sequences by
#: the model's own probabilities, so that a temperature of 0 or 1 changes nothing.
_NEUTRAL_FOR_BEAMS: Final[Mapping[str, Sequence[Any]]] = {
    "requested_format": (),
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "min_tokens": (0,),
    "stop": ([],),
    "prompt_logprobs": (),
    "stream": (False,),
}


class StreamOptions(StrictModel):
    """Streaming options."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Off = None


class SampledRequest(Formatted, Unsupported, StrictModel):
    """Fields of the bodies of completions and of chats."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Count | None = None

    n: Width | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: CountOrAll | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: BadWords | None = None
    seed: Int64 | None = None
    stop: Stop | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: TokenIds | None = None
    min_tokens: CountOrZero | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: CountOrAll | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    prompt_logprobs: CountOrAll | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None

    priority: Int64 | None = None
    cache_salt: CacheSalt | None = None
    request_id: RequestId | None = None

    # Accepted without effect.
    user: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="after")
    def _combines(self) -> SampledRequest:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options requires stream: true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs are not available in a stream; omit stream", "prompt_logprobs")
        if self.truncate_prompt_tokens == 0:
            raise RequestError("truncate_prompt_tokens must be -1 or at least 1", "truncate_prompt_tokens")
        if self.use_beam_search:
            self._check_beams()
        else:
            for name, neutral in (("length_penalty", 1), ("early_stopping", False)):
                if getattr(self, name) not in (None, neutral):
                    raise RequestError(f"{name} applies only to beam search; add use_beam_search: true", name)
        return self

    def _check_beams(self) -> None:
        for name, neutral in {**_NEUTRAL_FOR_BEAMS, **self.logprobs_neutral_for_beams}.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                if name == "requested_format":  # beam search does not follow grammars
                    name = "structured_outputs" if self.structured_outputs is not None else "response_format"
                raise RequestError(f"{name} is not supported with beam search; omit it", name)

    @property
    def logprobs_neutral_for_beams(self) -> Mapping[str, Sequence[Any]]:
        """Additions to `_NEUTRAL_FOR_BEAMS` for the endpoint's own fields about logprobs."""
        return {}

    @property
    def num_sequences(self) -> int:
        """Number of choices per prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether the body requests the usage of all choices at the end of a stream."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each event of a stream reports its choice's usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def sampling(self, logprobs: int | None, prompt_logprobs: int | None) -> dict[str, Any]:
        """Return fields of `SamplingParams` by name. Unset fields are None, or {} for `logit_bias`."""
        return {
            **{name: getattr(self, name) for name in _SAMPLING},
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
        }

    @property
    def beam_search(self) -> dict[str, Any] | None:
        """The fields of `BeamSearchParams`, or None without beam search."""
        if not self.use_beam_search:
            return None
        return {
            "beam_width": self.num_sequences,
            "ignore_eos": bool(self.ignore_eos),
            "length_penalty": 1.0 if self.length_penalty is None else self.length_penalty,
            "early_stopping": self.early_stopping or False,
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "skip_special_tokens": self.skip_special_tokens is not False,
        }
