"""Interface of the engine for the server, which `AsyncLLM` and the tests' fakes implement.

Life cycle: constructed (the engine starts to load) → `load` awaited in the event loop → serving → dead. `load` restarts
a dead engine; `shutdown` ends the life cycle in any state. Properties return the current state and are cheap: probes
read them often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from stoker_common.errors import EngineDeadError
from stoker_engine.contract.engine_state import EngineState
from stoker_engine.contract.names import ContentFormat
from stoker_engine.core.adapter import NO_ADAPTER, AdapterSource, LoadedAdapter
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.sampling_params import RequestParams
from stoker_engine.core.step_report import StepReport
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.tokens.output_stream import OutputStream
from stoker_engine.tokens.prompt_tokens import PromptTokens


class TokenTexts(Protocol):
    """Texts of tokens. Thread-safe.

    Attributes:
        chat_template: the chat template in use, if any.
    """

    chat_template: str | None

    def check_length(self, text: str, max_model_len: int, param: str = "prompt") -> None:
        """Refuse a text that exceeds `max_model_len` tokens however it is tokenized.

        Raises:
            RequestError: the text is too long.
        """
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of a few tokens."""
        ...

    def ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return tokens in the vocabulary's spelling."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be part of a character."""
        ...

    def special_token_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of those `texts` that are special tokens."""
        ...


class PromptTokenizer(Protocol):
    """Tokenization of texts and chats. Cancelling an awaited call ends the work."""

    @property
    def vocabulary(self) -> TokenTexts:
        """Texts of tokens."""
        ...

    async def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Tokenize texts."""
        ...

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        ...

    async def compile_grammar(self, structured: StructuredOutputs) -> str:
        """Return the checked grammar that constrains an output."""
        ...

    async def chat_text(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Render a chat with a template.

        Args:
            chat_template: template of the request, which is untrusted; None: the server's.

        Raises:
            RequestError: there is no template, it rejects these messages, or the request's template exceeds its limits.
        """
        ...


class EngineClient(Protocol):
    """One engine or several data-parallel engines, which fail and restart independently.

    Attributes:
        on_step: called in the event loop with the report of each step; set before `load`.
        on_later_load: called in the event loop with the index of an engine that `load` did not wait for, once it
            serves; set before `load`.
    """

    on_step: Callable[[StepReport], None] | None
    on_later_load: Callable[[int], None] | None

    @property
    def num_engines(self) -> int:
        """Number of engines."""
        ...

    async def load(self, engine: int | None = None) -> EngineInfo:
        """Wait until all engines are loaded; or, with `engine`, until a replacement of that dead engine is loaded.

        Raises:
            ArgumentError, ModelError: an engine cannot be loaded.
            EngineDeadError: an engine died while loading; or, while other engines serve, `engine` cannot be loaded
                again.
        """
        ...

    async def wait_dead(self, engine: int = 0) -> EngineDeadError:
        """Wait until an engine is dead; the error's message is the cause. Never returns after `shutdown`."""
        ...

    def serves(self, engine: int) -> bool:
        """Whether an engine is loaded and live. Thread-safe."""
        ...

    @property
    def status(self) -> str:
        """What each engine does, or why it died, for example "loading: reading weights"."""
        ...

    @property
    def engine_states(self) -> list[EngineState]:
        """State of each engine."""
        ...

    @property
    def is_live(self) -> bool:
        """Whether an engine's process runs and is not stuck."""
        ...

    @property
    def is_stuck(self) -> bool:
        """Whether at least one engine is stuck, that is, makes no progress, and all others are stuck or dead."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether all engines have been loaded once, and at least one serves."""
        ...

    @property
    def info(self) -> EngineInfo:
        """Properties of the loaded engines, with the lowest limits of all."""
        ...

    def info_of(self, engine: int) -> EngineInfo:
        """Return the facts about an engine from its last load."""
        ...

    @property
    def tokenizer(self) -> PromptTokenizer:
        """The model's tokenizer, once it is loaded."""
        ...

    async def add_request(
        self,
        stream: OutputStream,
        request_id: str,
        prompt: PromptTokens,
        params: RequestParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        adapter: int = NO_ADAPTER,
    ) -> int:
        """Start a request, whose deltas go to `stream`. After success the caller must call `abort` in the end.

        Args:
            adapter: number of the LoRA adapter, or `NO_ADAPTER`.

        Returns:
            Number of sequences, each of which ends with a finish reason.

        Raises:
            RequestError: the request cannot be served.
            EngineDeadError: no engine can take the request. If its engine dies later, the stream raises this error.
        """
        ...

    def has(self, request_id: str) -> bool:
        """Whether a request has been added, has not been aborted, and has not been lost with an engine."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request if it runs, and forget it. Unknown ids are ignored."""
        ...

    async def load_adapter(self, source: AdapterSource) -> LoadedAdapter:
        """Load an adapter into all serving engines; afterwards requests may use its number.

        Engines that restart load it again.

        Raises:
            AdapterError: the adapter cannot be loaded; in that case no engine has it.
            EngineDeadError: no engine serves, or all that serve died meanwhile.
        """
        ...

    def remove_adapter(self, number: int) -> None:
        """Remove an unused adapter from all engines. Unknown numbers are ignored."""
        ...

    def adapter_error(self, number: int) -> str | None:
        """Return the error if no serving engine could load an adapter again, else None. Thread-safe."""
        ...

    def shutdown(self) -> None:
        """Stop all engines; requests in flight end with `EngineDeadError`."""
        ...
