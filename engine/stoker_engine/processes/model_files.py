"""The model's files and its tokenizer's process, found and started by a thread while the engines' processes start."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from stoker_common.errors import EngineDeadError, RequestError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.grammar.token_table import TokenTable
from stoker_engine.models.check_model import check_folder
from stoker_engine.models.hub.locate import locate_model, locate_tokenizer
from stoker_engine.processes.dp_engine import DEAD, resolve
from stoker_engine.tokens.tokenizer_process import TokenizerProcess

_T = TypeVar("_T")


class ModelFiles:
    """The model's files, found once for all engines, and its tokenizer.

    Args:
        chat_template: a Jinja template or its file, instead of the model's.
        log_format: log format of the tokenizer's process; see `logs.configure`.
        found: `args` with the path of the files that another process found; None: `start` finds them.

    Attributes:
        args: the engines' arguments with the path of the files, once they are found.
        tokenizer: the tokenizer, once it is loaded; None before.
    """

    def __init__(
        self, args: EngineArgs, chat_template: str | None, log_format: str, found: Future[EngineArgs] | None
    ) -> None:
        self.args: Future[EngineArgs] = Future()
        self.tokenizer: TokenizerProcess | None = None
        self._given, self._found = args, found
        self._chat_template, self._log_format = chat_template, log_format
        self._started: Future[TokenizerProcess] = Future()
        self._load: asyncio.Task[TokenizerProcess] | None = None
        self._closed = False

    def start(self) -> None:
        """Start the thread. Nothing waits for it when the process ends: a download may last hours."""
        threading.Thread(target=self._find, name="locate-model", daemon=True).start()

    def close(self) -> None:
        """End the tokenizer's process."""
        self._closed = True
        if self._started.done() and self._started.exception() is None:
            self._started.result().close()

    def located(self) -> asyncio.Future[EngineArgs]:
        """Return `args` as a future of the running event loop.

        It raises `ArgumentError` or `ModelError` if the files are not found, or are not a model that can be served.
        """
        return _in_event_loop(self.args)

    async def loaded_tokenizer(self) -> TokenizerProcess:
        """Wait until the tokenizer is loaded, and return it.

        Raises:
            ArgumentError, ModelError: the model has no files, or no tokenizer.
            EngineDeadError: the files were closed meanwhile.
        """
        if self._load is None:
            self._load = asyncio.create_task(self._load_tokenizer())
        return await asyncio.shield(self._load)

    async def token_table(self) -> TokenTable | None:
        """Return the vocabulary as bytes for grammars; None if it is unavailable: the first grammar then fails."""
        tokenizer = await self.loaded_tokenizer()
        try:
            return await tokenizer.token_table()
        except RequestError:
            return None

    def _find(self) -> None:
        try:
            model = locate_model(self._given) if self._found is None else Path(self._found.result().model)
            if model.is_dir():
                check_folder(self._given, model)  # before the tokenizer, which a folder that is no model lacks, too
            self.args.set_result(dataclasses.replace(self._given, model=str(model), revision=None))
            path = locate_tokenizer(self._given, model)
            tokenizer = TokenizerProcess(path, self._chat_template, self._log_format)
            tokenizer.start()
        except Exception as error:
            if not self.args.done():
                self.args.set_exception(error)
            self._started.set_exception(error)
            return
        self._started.set_result(tokenizer)
        if self._closed:  # `close` may not have seen it
            tokenizer.close()

    async def _load_tokenizer(self) -> TokenizerProcess:
        tokenizer = await _in_event_loop(self._started)
        try:
            await tokenizer.load()
            if self._closed:
                raise EngineDeadError(DEAD)
        except BaseException:
            tokenizer.close()
            raise
        self.tokenizer = tokenizer
        return tokenizer


def _in_event_loop(future: Future[_T]) -> asyncio.Future[_T]:
    """Return a future of the running event loop for a thread's result. Cancelling it does not affect the thread."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[_T] = loop.create_future()

    def pass_on(done: Future[_T]) -> None:
        error = done.exception()
        assert error is None or isinstance(error, Exception)
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(resolve, result, done.result() if error is None else error)

    future.add_done_callback(pass_on)
    return result
