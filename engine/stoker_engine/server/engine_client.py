"""What the server needs of an engine: `AsyncLLM` is one, tests bring another."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from stoker_engine.core.outputs import OutputDelta
from stoker_engine.core.sampling_params import SamplingParams


class PromptTokenizer(Protocol):
    """Text and chats → tokens. Called from worker threads, several at once."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text."""
        ...

    def render_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        """The tokens of a chat, up to where the assistant's answer begins."""
        ...


class EngineClient(Protocol):
    """An engine that many requests share."""

    @property
    def tokenizer(self) -> PromptTokenizer:
        """The model's tokenizer."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output."""
        ...

    @property
    def is_healthy(self) -> bool:
        """Whether requests make progress."""
        ...

    def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> AsyncGenerator[OutputDelta, None]:
        """What each step adds to a request. Closing the generator aborts the request."""
        ...
