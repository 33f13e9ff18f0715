"""State and operations that all routes share."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from prometheus_client import generate_latest

from stoker_common.errors import NotFoundError, RequestError
from stoker_engine.contract.engine_state import EngineState
from stoker_engine.contract.serve_args import ServeArgs
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.sampling_params import RequestParams
from stoker_engine.metrics import process_registry
from stoker_engine.server.adapters.config_file import AdapterConfigFile
from stoker_engine.server.adapters.folders import AdapterFolders
from stoker_engine.server.adapters.registry import AdapterRegistry, AdapterState
from stoker_engine.server.conversation.generation import Generation
from stoker_engine.server.conversation.request import ChatRequest
from stoker_engine.server.engine.admission import Admission
from stoker_engine.server.engine.engine_client import EngineClient
from stoker_engine.server.engine.lifecycle import Lifecycle
from stoker_engine.server.engine.peers import Peers
from stoker_engine.server.engine.restarts import Restarts, wait_any
from stoker_engine.server.observability.engine_records import EngineRecords
from stoker_engine.server.observability.request_log import RequestLog
from stoker_engine.server.parsers.choice import Parsers, Parsing
from stoker_engine.server.unavailable import NotStartedError
from stoker_engine.tokens.prompt_tokens import PromptTokens

#: Maximum number of names in an error.
_MAX_LISTED: Final = 20


class Service:
    """One served model and its adapters. Used from the event loop only.

    Raises:
        ArgumentError: the file of ``--lora-config`` cannot be read, or is invalid.

    Args:
        peers: the other front ends of the server; None: there are none, and this process has the engines' records.

    Attributes:
        model_names: names of the model; responses and metrics use the first.
        adapter_folders: the folders of ``--lora-dir``.
        adapter_config: the file of ``--lora-config``, or None.
        registry: the process's metrics.
        restarts: the restarts of each engine; not limited here if another process restarts the engines.
        running: generations of this process that are admitted and have not ended.
        loaded: set once all engines have been loaded.
        created: start of the server, in Unix seconds.
    """

    def __init__(self, args: ServeArgs, client: EngineClient, peers: Peers | None = None) -> None:
        self.args = args
        self.client = client
        self.peers = peers
        self.model_names = args.model_names
        self.registry = process_registry()
        self.lifecycle = Lifecycle()
        self.running: set[Generation] = set()
        self.created = int(time.time()) if peers is None else peers.created
        self.loaded = asyncio.Event()
        self._begins_after: Sequence[tuple[int, ...]] | None = None  # computed on first use
        frontend = args.frontend
        max_restarts = frontend.max_engine_restarts if peers is None else None
        self.restarts = [Restarts(max_restarts) for _ in range(client.num_engines)]
        client.on_later_load = lambda engine: self.restarts[engine].on_later_load()
        self._requests = RequestLog(frontend.enable_log_requests, frontend.max_log_len)
        self._records = EngineRecords(args, client, self.registry, self._requests) if peers is None else None
        self._admission = Admission(
            frontend.max_num_queued_reqs, frontend.max_num_queued_tokens, self._on_rejected, peers
        )
        self.adapters = AdapterRegistry(client, self.model_names)
        self.adapter_folders = AdapterFolders(frontend.lora_dir)
        self.adapter_config: AdapterConfigFile | None = None
        if frontend.lora_config is not None:
            self.adapter_config = AdapterConfigFile(Path(frontend.lora_config), self.adapters, self.adapter_folders)
        self._has_modules = not frontend.adapters  # whether the adapters of --lora-modules are loaded

    @property
    def model_name(self) -> str:
        """The model's name in responses and metrics."""
        return self.model_names[0]

    @functools.cached_property
    def parsers(self) -> Parsers:
        """Parsers of the model's output; available once the tokenizer is loaded."""
        return Parsers.of(self.args.frontend, self.client.tokenizer.vocabulary.chat_template)

    @property
    def is_loaded(self) -> bool:
        """Whether all engines have been loaded once."""
        return self.loaded.is_set()

    @property
    def num_running(self) -> int:
        """Number of generations that are admitted and have not ended, of all front ends."""
        peers = self.peers
        return len(self.running) + (0 if peers is None else peers.counts.total(but=peers.index)[0])

    @property
    def is_ready(self) -> bool:
        """Whether an engine serves and, with several front ends, whether all of them have been ready once."""
        return self.client.is_ready and (self.peers is None or self.peers.counts.is_started)

    @property
    def status(self) -> str:
        """What each engine does, or why it died."""
        if self.client.is_ready and not self.is_ready:
            return "loading: other front ends start"
        return self.client.status

    async def engine_states(self) -> list[EngineState]:
        """Return the state of each engine."""
        if self.peers is not None:
            states: list[EngineState] = await self.peers.call("engine_states")
            return states
        return self.client.engine_states

    async def metrics(self) -> bytes:
        """Return the server's metrics in Prometheus' classic text format, encoded in a worker thread."""
        # In newer formats the library writes vllm_ for vLLM's prefix vllm: .
        if self.peers is not None:
            return await self.peers.metrics()
        return await asyncio.to_thread(generate_latest, self.registry)

    def on_loaded(self, info: EngineInfo) -> None:
        """Record that the engines are loaded for the first time."""
        if self._records is not None:
            self._records.on_loaded(info)
            if self.args.engine.enable_lora:
                self._records.look_up_adapters(
                    {state: functools.partial(self.adapters.count, state) for state in AdapterState}
                )
        _ = self.parsers  # logs the detected parsers
        self.loaded.set()

    async def load_modules(self) -> None:
        """Load the adapters of ``--lora-modules``.

        Raises:
            ArgumentError: an adapter cannot be loaded.
            EngineDeadError: no engine serves, or all that serve died meanwhile.
        """
        await self.adapters.load_modules(self.args.frontend.adapters)
        self._has_modules = True

    @property
    def has_adapters(self) -> bool:
        """Whether ``--lora-modules`` are loaded, and ``--lora-config`` has been applied."""
        return self._has_modules and (self.adapter_config is None or self.adapter_config.is_settled)

    def on_death(self, engine: int) -> None:
        """Record the death of an engine."""
        if self._records is not None:
            self._records.on_death(engine)

    def on_restart(self, engine: int) -> None:
        """Record the start of a restart."""
        if self._records is not None:
            self._records.on_restart(engine)

    def on_loaded_again(self, engine: int) -> None:
        """Record that a restarted engine is loaded."""
        if self._records is not None:
            self._records.on_loaded_again(engine)

    async def wait_ready(self) -> None:
        """Wait until an engine is ready, if restarts may achieve that.

        Raises:
            NotStartedError: no engine is or becomes ready.
        """
        client = self.client
        if client.is_ready:
            return
        may_be_again = self.is_loaded and not client.is_stuck
        if not (may_be_again and await wait_any(self.restarts, lambda: client.is_ready)):
            raise NotStartedError(f"the model is unavailable: {client.status}")

    def check_model(self, name: str | None) -> str:
        """Check the model of a request, which may be unset or name an adapter.

        Returns:
            Name that the answer carries: the model's first name, or the adapter's.

        Raises:
            NotFoundError: no model and no adapter has that name.
            NotStartedError: the adapter is still loading, or has failed.
        """
        if name is None or name in self.model_names:
            return self.model_name
        try:
            self.adapters.check(name)
        except NotFoundError:
            names = [*self.model_names, *(adapter.module.name for adapter in self.adapters)]
            listed = ", ".join(names[:_MAX_LISTED]) + (" and others" if len(names) > _MAX_LISTED else "")
            message = f"the model {name[:200]!r} is not served here; available: {listed}"
            raise NotFoundError(message, "model", "model_not_found") from None
        return name

    def check_length(self, text: str) -> None:
        """Refuse a text that is certainly too long, before it is tokenized.

        Raises:
            RequestError: the text exceeds the model's context however it is tokenized.
        """
        self.client.tokenizer.vocabulary.check_length(text, self.client.info.max_model_len)

    def check(self, model: str | None, priority: int | None) -> str:
        """Check model and priority, before the prompt is tokenized.

        Returns:
            Name of the model, or the adapter, in the answer.

        Raises:
            RequestError: the model is not available, or the server ignores priorities.
        """
        name = self.check_model(model)
        if priority and self.args.engine.scheduling_policy != "priority":
            raise RequestError("priority requires a server with --scheduling-policy priority", "priority")
        return name

    async def parsing(self, request: ChatRequest, prompt: str) -> Parsing:
        """Return the parsing of the answers to `request`, whose rendered prompt is `prompt`."""
        parsers, tools = self.parsers, request.tool_use
        markers = [
            marker
            for parser, is_used in (
                (parsers.reasoning, True),
                (parsers.tools, tools.mode == "auto" or parsers.forces_own_calls(tools)),
            )
            if parser is not None and is_used
            for marker in parser.markers
        ]
        visible = self.client.tokenizer.vocabulary.special_token_ids(markers) if markers else frozenset[int]()
        conversation = request.conversation
        num_calls = sum(len(message.tool_calls) for message in conversation.messages)
        begins_after, continued = await self._answer_begins_after(), conversation.continue_final_message
        return Parsing(parsers, prompt, tools, visible, begins_after, num_calls, continued)

    async def _answer_begins_after(self) -> Sequence[tuple[int, ...]]:
        """Return the token sequences after any of which the answer begins, if the model reasons."""
        if self._begins_after is None:
            texts = () if self.parsers.reasoning is None else self.parsers.reasoning.answer_begins_after
            encoded = await self.client.tokenizer.encode(texts, False) if texts else []
            self._begins_after = tuple(tuple(token_ids) for token_ids in encoded)
        return self._begins_after

    def generation(
        self,
        answer_id: str,
        model: str,
        prompts: Sequence[PromptTokens],
        params: Sequence[RequestParams],
        *,
        n: int,
        priority: int | None,
        cache_salt: str | None,
        stream_interval: int | None,
        field_names: Mapping[str, str],
        report_output: bool = True,
    ) -> Generation:
        """Log a request, and return its generation, which has not started.

        Args:
            model: name returned by `check`.
        """
        for prompt, its_params in zip(prompts, params, strict=True):
            self._requests.on_received(answer_id, prompt, its_params, self.client.tokenizer.vocabulary)
        return Generation(
            self.client,
            self.wait_ready,
            self._admission,
            self.running,
            self.adapters.hold,
            answer_id,
            model,
            prompts,
            params,
            n=n,
            priority=priority or 0,
            cache_salt=cache_salt or "",
            stream_interval=max(stream_interval or 1, self.args.frontend.stream_interval),
            field_names=field_names,
            report_cached=self.args.frontend.enable_prompt_tokens_details,
            report_output=report_output,
            front_end="" if self.peers is None else f"{self.peers.name}.",
        )

    def _on_rejected(self, limit: str) -> None:
        if self.peers is not None:
            self.peers.on_rejected(limit)
        elif self._records is not None:
            self._records.on_rejected(limit)
