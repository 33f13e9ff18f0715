"""What we are asked, validated. Unknown names are refused; null means the default, as at OpenAI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from stoker_engine.contract.errors import RequestError
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.server.unbuilt import Off, UnbuiltChat, UnbuiltCompletion, UnbuiltMessage

#: Most prompts in one completion request; more belong in several.
MAX_PROMPTS: Final = 1024
#: Most stop strings; each is looked for in every new piece of text.
MAX_STOPS: Final = 16
#: What OpenAI generates for a completion that does not say how much.
DEFAULT_MAX_TOKENS: Final = 16

_STRICT = ConfigDict(extra="forbid", strict=True)


def _or_else(sentence: str) -> WrapValidator:
    """One sentence in place of what pydantic says of each member of a union."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("shape", "{sentence}", {"sentence": sentence}) from None

    return WrapValidator(validate)


Count = Annotated[int, Field(ge=1, lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Stop = Annotated[
    str | Annotated[list[str], Field(max_length=MAX_STOPS)],
    _or_else(f"must be a string or a list of at most {MAX_STOPS} strings"),
]
Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    _or_else("must be a string, a list of strings, a list of token ids, or a list of lists of token ids"),
]


class StreamOptions(BaseModel):
    """How to stream."""

    model_config = _STRICT

    include_usage: bool | None = None
    continuous_usage_stats: Off = None
    include_obfuscation: Off = None


class Sampled(BaseModel):
    """What completions and chat have in common."""

    model_config = _STRICT

    model: str | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Int64 | None = None
    stop: Stop | None = None
    stop_token_ids: list[Int64] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    # These label a request for whoever keeps accounts or logs; they ask nothing of us.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with an event that tells the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling_params(self, max_tokens: int | None) -> SamplingParams:
        """How to sample, with at most `max_tokens` tokens (None: to the end of the context).

        Raises:
            RequestError: a value is out of range.
        """
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=self.seed,
            max_tokens=max_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )


class CompletionRequest(UnbuiltCompletion, Sampled):
    """The body of /v1/completions."""

    prompt: Prompt
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _count_prompts(self) -> CompletionRequest:
        if not 1 <= len(self.prompts) <= MAX_PROMPTS:
            raise RequestError(f"prompt must hold 1 to {MAX_PROMPTS} prompts, not {len(self.prompts)}", "prompt")
        return self

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, each of which gets a choice."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return cast("list[str] | list[list[int]]", self.prompt)


class TextPart(BaseModel):
    """A piece of a message's text."""

    model_config = _STRICT

    type: Literal["text"]
    text: str


Content = Annotated[
    str | Annotated[list[TextPart], Field(min_length=1)],
    _or_else('must be a string, or a list of {"type": "text", "text": …} parts; this model reads only text'),
]


class Message(UnbuiltMessage):
    """One message of a chat."""

    model_config = _STRICT

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates know it."""
        # `developer` is OpenAI's newer word for what the templates on the hub call `system`.
        role = "system" if self.role == "developer" else self.role
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        message = {"role": role, "content": text}
        return message if self.name is None else message | {"name": self.name}


class ChatCompletionRequest(UnbuiltChat, Sampled):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    parallel_tool_calls: bool | None = None  # without tools it asks for nothing, whatever it is

    @model_validator(mode="after")
    def _one_limit(self) -> ChatCompletionRequest:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise RequestError("max_tokens is the old name of max_completion_tokens; give one of them", "max_tokens")
        return self
