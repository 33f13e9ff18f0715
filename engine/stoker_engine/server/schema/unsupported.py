"""Fields of OpenAI's and vLLM's that ask for something we do not do.

Clients send many of them at the value that asks for nothing (`n: 1`, `tools: []`), so that value and null are
accepted. Any other is refused, naming the field: an answer that silently leaves out what was asked for is
worse than none. Who builds a feature moves its field from here to the request that has it: `sampled_request`,
`completion_request` or `chat_request`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class OnlyValue:
    """Accepts null and the given values, which ask for nothing."""

    def __init__(self, *neutral: Any) -> None:
        self.neutral = neutral

    def check(self, value: Any) -> Any:
        """Refuses any other value."""
        if value is None or any(_same(value, neutral) for neutral in self.neutral):
            return value
        allowed = " or ".join(json.dumps(neutral) for neutral in (*self.neutral, None))
        raise PydanticCustomError("unsupported", "this server supports only {allowed} here", {"allowed": allowed})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Replaces the annotated type's own validation."""
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Describes to clients what is accepted."""
        return {"enum": [*self.neutral, None]}


class Renamed(OnlyValue):
    """Accepts null alone, and says what a field is called today."""

    def __init__(self, instead: str) -> None:
        super().__init__()
        self.instead = instead

    def check(self, value: Any) -> Any:
        """Refuses any value."""
        if value is not None:
            raise PydanticCustomError("unsupported", "this is an old name; use {instead}", {"instead": self.instead})
        return value


def _same(value: Any, neutral: Any) -> bool:
    """Equality, except that true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


Absent = Annotated[Any, OnlyValue()]
Off = Annotated[Any, OnlyValue(False)]
On = Annotated[Any, OnlyValue(True)]
Zero = Annotated[Any, OnlyValue(0)]
One = Annotated[Any, OnlyValue(1)]
NoList = Annotated[Any, OnlyValue([])]
NoDict = Annotated[Any, OnlyValue({})]


class Unsupported(BaseModel):
    """Common to completions and chat."""

    # OpenAI's
    service_tier: Annotated[Any, OnlyValue("auto", "default")] = None

    # vLLM's sampling parameters
    logprob_token_ids: Absent = None
    repetition_detection: Absent = None
    spaces_between_special_tokens: On = None
    thinking_token_budget: Annotated[Any, OnlyValue(-1)] = None
    vllm_xargs: NoDict = None
    watermarking: Off = None

    # vLLM's ways of running and reporting
    ec_transfer_params: Absent = None
    kv_transfer_params: Absent = None
    mm_payload: Annotated[Any, OnlyValue("tensors")] = None
    return_mm_kwargs: Annotated[Any, OnlyValue(True)] = None
    return_token_offsets: Off = None
    routed_experts_prompt_start: Zero = None
    session_id: Absent = None
    stream_interval: One = None


class UnsupportedCompletionFields(Unsupported):
    """Of completions alone."""

    prompt_embeds: Absent = None
    suffix: Absent = None


class UnsupportedChatFields(Unsupported):
    """Of chat alone."""

    # OpenAI's
    audio: Absent = None
    function_call: Annotated[Any, OnlyValue("none", "auto")] = None
    functions: NoList = None
    modalities: Annotated[Any, OnlyValue(["text"])] = None
    prediction: Absent = None
    verbosity: Annotated[Any, OnlyValue("medium")] = None
    web_search_options: Absent = None

    # vLLM's
    media_io_kwargs: NoDict = None
    mm_processor_kwargs: NoDict = None
    return_prompt_text: Off = None


class UnsupportedMessageFields(BaseModel):
    """Of a chat message. Clients send an assistant's message back as they got it, nulls and all."""

    annotations: NoList = None
    audio: Absent = None
    function_call: Absent = None
    refusal: Absent = None
