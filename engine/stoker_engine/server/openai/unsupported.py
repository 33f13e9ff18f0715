"""Unsupported fields of OpenAI and vLLM; see `fields.unsupported`.

When a feature is implemented, its field moves to the module of the body or message.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel

from stoker_engine.server.fields.unsupported import Absent, NoDict, NoList, Off, On, OnlyValue, Zero


class Unsupported(BaseModel):
    """Unsupported fields of completions and chats."""

    # OpenAI's
    service_tier: Annotated[Any, OnlyValue("auto", "default")] = None

    # vLLM's sampling parameters
    logprob_token_ids: Absent = None
    repetition_detection: Absent = None
    spaces_between_special_tokens: On = None
    thinking_token_budget: Annotated[Any, OnlyValue(-1)] = None
    vllm_xargs: NoDict = None
    watermarking: Off = None

    # vLLM's options for running and reporting
    ec_transfer_params: Absent = None
    kv_transfer_params: Absent = None
    mm_payload: Annotated[Any, OnlyValue("tensors")] = None
    return_mm_kwargs: Annotated[Any, OnlyValue(True)] = None
    return_token_offsets: Off = None
    routed_experts_prompt_start: Zero = None
    session_id: Absent = None


class UnsupportedCompletionFields(Unsupported):
    """Unsupported fields of completions."""

    prompt_embeds: Absent = None
    suffix: Absent = None


class UnsupportedChatFields(Unsupported):
    """Unsupported fields of chats."""

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
    """Unsupported fields of a chat message. Clients send an assistant's message back as received, including nulls."""

    annotations: NoList = None
    audio: Absent = None
    function_call: Absent = None
    refusal: Absent = None
