"""What the server needs of an engine: `AsyncLLM` is one, tests bring another.

A client's life: made (the engine begins to load) → `load` awaited, from the event loop → serves → dead, from where
`load` leads on again, or `shutdown`. The properties are true at the moment of asking, and cheap: probes ask them
often.
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
    """The text of tokens; usable from any thread.

    Attributes:
        chat_template: the model's; None: it has none.
    """

    chat_template: str | None

    def check_length(self, text: str, max_model_len: int, param: str = "prompt") -> None:
        """Refuses a text that is too long for `max_model_len` tokens, whatever its tokens are.

        Raises:
            RequestError: it is.
        """
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a few tokens."""
        ...

    def ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary spells them."""
        ...

    def token_text(self, token_id: int) -> str:
        """What a token says by itself."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; a token may hold part of a character."""
        ...

    def special_token_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """The ids of those of `texts` that are special tokens."""
        ...


class PromptTokenizer(Protocol):
    """Text and chats ⇄ tokens. Cancelling what is awaited ends the work."""

    @property
    def vocabulary(self) -> TokenTexts:
        """The text of single tokens."""
        ...

    async def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The tokens of texts."""
        ...

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens."""
        ...

    async def compile_grammar(self, structured: StructuredOutputs) -> str:
        """The grammar that an output must keep, checked."""
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
        """A chat as the template writes it.

        Args:
            chat_template: of the request itself: nobody's whom one could trust.

        Raises:
            RequestError: there is no template, it refuses these messages, or the request's own takes too much.
        """
        ...


class EngineClient(Protocol):
    """What many requests share: one engine, or several data-parallel ones that live and die by themselves.

    Attributes:
        on_step: called in the event loop with what each step did; set before `load`.
    """

    on_step: Callable[[StepReport], None] | None

    @property
    def num_engines(self) -> int:
        """How many engines there are."""
        ...

    async def load(self, engine: int | None = None) -> EngineInfo:
        """Waits until the engine is loaded, with all engines; or, where an engine is dead, until another is in its
        place.

        Raises:
            ArgumentError, ModelError: it cannot be loaded.
            EngineDeadError: it died while it loaded; or an engine cannot be loaded again, while others serve.
        """
        ...

    async def wait_dead(self, engine: int = 0) -> EngineDeadError:
        """Waits until an engine is dead; the error's sentence says of what. Never returns after `shutdown`."""
        ...

    def serves(self, engine: int) -> bool:
        """Whether an engine is loaded and live. Any thread may ask."""
        ...

    @property
    def status(self) -> str:
        """A sentence on what the engine does, or of what it died: "loading: reading weights"."""
        ...

    @property
    def engine_states(self) -> list[EngineState]:
        """How each engine does, one after the other."""
        ...

    @property
    def is_live(self) -> bool:
        """Whether loading or stepping progresses, in any engine."""
        ...

    @property
    def is_stuck(self) -> bool:
        """Whether it is there and does nothing, so that nobody knows whether it will answer again."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether it is loaded, and an engine is live."""
        ...

    @property
    def info(self) -> EngineInfo:
        """Facts of the engines, once they are loaded: what all of them can serve."""
        ...

    def info_of(self, engine: int) -> EngineInfo:
        """Facts of an engine, as it was loaded last."""
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
        """Begins a request, whose deltas go to `stream`. Whoever calls this calls `abort` in the end.

        Args:
            adapter: the number of the adapter that it uses.

        Returns:
            How many sequences there will be, each of which ends with a finish reason.

        Raises:
            RequestError: the request cannot be served as it is.
            EngineDeadError: the engine is dead. Where it dies later, the stream raises it.
        """
        ...

    def has(self, request_id: str) -> bool:
        """Whether a request has started, is not aborted, and lives on: its engine has not died."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request, if it runs, and forgets it. Unknown ids are ignored."""
        ...

    async def load_adapter(self, source: AdapterSource) -> LoadedAdapter:
        """Loads an adapter into all engines that serve; requests may name its number then. An engine that is loaded
        again loads it, too.

        Raises:
            AdapterError: it cannot be loaded; no engine has it then.
            EngineDeadError: the engine is dead, or died meanwhile.
        """
        ...

    def remove_adapter(self, number: int) -> None:
        """Has all engines drop an adapter that no request uses any more. Unknown numbers are ignored."""
        ...

    def adapter_error(self, number: int) -> str | None:
        """Why an adapter that was loaded cannot be used any more: an engine that was loaded again did not find it as it
        was. Any thread may ask."""
        ...

    def shutdown(self) -> None:
        """Ends the engine; requests in flight end with `EngineDeadError`."""
        ...
