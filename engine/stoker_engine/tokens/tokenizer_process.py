"""Client of the tokenizer process: sends jobs and receives their results without blocking the event loop.

Jobs wait in lanes by size or kind. Each lane has its own worker, so that small jobs never wait for large ones. A
cancelled job is not started, or is stopped by killing its worker; the next job gets a new worker. All lanes but the
small one start a new worker for each job, so that memory is returned to the system.

    lane         jobs, one at a time
    small        up to 64 KiB; its worker is reused
    medium       up to 1 MiB
    large        larger
    untrusted    rendering of a template from a request, with limits of time and memory
    grammars     compilation of grammars, with a short limit of time and limits of memory and of waiting jobs
    slow         grammars that exceeded that limit of time, with a longer one
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from stoker_common.errors import (
    ModelError,
    OverloadedError,
    RequestError,
    RequestFailedError,
    StokerError,
)
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.grammar.limits import (
    COMPILE_CPU_S,
    COMPILE_MEMORY,
    COMPILE_TIMEOUT_S,
    MAX_SLOW,
    MAX_WAITING,
    QUICK_S,
)
from stoker_engine.grammar.token_table import TokenTable
from stoker_engine.tokens.grammar_cache import GrammarCache
from stoker_engine.tokens.tokenizer_worker import ANSWER, FORK, HELLO, JOB
from stoker_engine.tokens.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

#: Arguments of the interpreter. `-P`: modules in the working directory are not imported.
PROGRAM: Final = ("-P", "-m", "stoker_engine.tokens.tokenizer_worker")

#: Limits of rendering a chat template from a request: seconds, and bytes of memory.
TEMPLATE_TIMEOUT_S: Final = 5.0
TEMPLATE_MEMORY: Final = 512 * 1024**2

#: Seconds. If a worker with limits dies within this time, its job is retried: the cause may be external. A job that
#: exceeds its limits usually takes longer, and would fail again.
_EARLY_S: Final = 1.0

#: Maximum size of the result of a worker with limits, in bytes.
_MAX_UNTRUSTED_BYTES = 256 * 1024**2

#: Seconds to wait for a fork before the process counts as hung. The process may first read the vocabulary for grammars.
_FORK_TIMEOUT_S = 30.0

#: Error code for a grammar whose compilation exceeds a limit or crashes.
TOO_COMPLEX: Final = "grammar_too_complex"

_FAILED = "the tokenizer failed for this request; see the server's log"

_LANES = ((2**16, "small"), (2**20, "medium"))


class _BrokenError(RequestFailedError):
    """All jobs of this kind fail."""


class _WorkerGoneError(Exception):
    """A worker failed, or none can be started."""


@dataclass(eq=False)
class _Worker:
    """A worker and the connection to it."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def do(self, job: bytes, max_bytes: int | None) -> tuple[dict[str, Any], bytes]:
        """Run `job`. Return the header and the data of its result.

        Raises:
            _WorkerGoneError: the worker died, or its result is invalid or too large.
        """
        try:
            self.writer.writelines((JOB.pack(len(job)), job))
            await self.writer.drain()
            header, data = ANSWER.unpack(await self.reader.readexactly(ANSWER.size))
            if max_bytes is not None and header + data > max_bytes:
                raise _WorkerGoneError
            return json.loads(await self.reader.readexactly(header)), await self.reader.readexactly(data)
        except (OSError, EOFError, ValueError) as error:
            raise _WorkerGoneError from error

    def kill(self) -> None:
        """Kill the worker."""
        if not self.reader.at_eof():  # otherwise it has exited, and its pid may have been reused
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self.writer.close()


@dataclass
class _Lane:
    """Runs jobs of one kind sequentially.

    Attributes:
        timeout: limit of a job, in seconds. In lanes by size only a hung worker reaches it.
        keeps: whether the worker is reused for the next job.
        fork: limits and kind of the lane's workers; see `tokenizer_worker.FORK`.
        max_jobs: maximum number of waiting and running jobs; None: unlimited.
        waiting: number of waiting and running jobs; counted only for grammars.
    """

    timeout: float
    keeps: bool = False
    fork: bytes = FORK.pack(0, 0, 5, False)
    max_jobs: int | None = None
    waiting: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    worker: _Worker | None = None


class TokenizerProcess:
    """A tokenizer in its own process, for one event loop.

    Attributes:
        vocabulary: the tokenizer's vocabulary, set by `load`.
    """

    vocabulary: Vocabulary

    def __init__(self, path: Path, chat_template: str | None = None, log_format: str = "text") -> None:
        self._arguments = [log_format, str(path), *([] if chat_template is None else [chat_template])]
        compiles = FORK.pack(COMPILE_MEMORY, COMPILE_CPU_S, 5, True)
        self._lanes = {
            "small": _Lane(30, keeps=True, fork=FORK.pack(0, 0, 0, False)),
            "medium": _Lane(120),
            "large": _Lane(600),
            "untrusted": _Lane(
                TEMPLATE_TIMEOUT_S, fork=FORK.pack(TEMPLATE_MEMORY, int(TEMPLATE_TIMEOUT_S) + 1, 5, False)
            ),
            "grammars": _Lane(QUICK_S, fork=compiles, max_jobs=MAX_WAITING),
            "slow": _Lane(COMPILE_TIMEOUT_S, fork=compiles, max_jobs=MAX_SLOW),
        }
        self._grammars = GrammarCache()
        self._workers: set[_Worker] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    def start(self) -> None:
        """Start the process; `load` waits for it. Any thread may call this before `load`.

        Raises:
            OSError: the process cannot be started.
        """
        parent_socket, child_socket = socket.socketpair()
        with child_socket:
            self._process = self._run(child_socket.fileno())
        parent_socket.setblocking(False)
        self._control = parent_socket

    async def load(self) -> Vocabulary:
        """Wait until the process has loaded the tokenizer. Starts the process if it is not started.

        Raises:
            ModelError: there is no tokenizer, or it cannot be read.
            ArgumentError: the chat template's file cannot be read.
        """
        if self._process is None:
            self.start()
        self.vocabulary = await self._loaded()
        small = self._lanes["small"]
        with contextlib.suppress(_WorkerGoneError):  # the first request tries again
            small.worker = await self._fork(small.fork)
        return self.vocabulary

    async def _loaded(self) -> Vocabulary:
        assert self._process is not None and self._control is not None, "the process is not started yet"
        try:
            (length,) = JOB.unpack(await _receive(self._control, JOB.size))
            loaded = pickle.loads(await _receive(self._control, length))
        except (OSError, EOFError):
            code = await asyncio.to_thread(self._process.wait)
            raise ModelError(f"the tokenizer process died while loading (exit code {code})") from None
        except BaseException:
            self._process.kill()  # a later read would misinterpret the rest of its message
            raise
        if isinstance(loaded, Vocabulary):
            return loaded
        kind, arguments = loaded
        error: StokerError = kind(*arguments)
        raise error

    def _run(self, descriptor: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *PROGRAM, str(descriptor), *self._arguments],
            pass_fds=(descriptor,),
            process_group=0,  # Ctrl-C in a terminal must only reach the server
        )

    async def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text.

        Raises:
            RequestError: a text is not valid Unicode.
        """
        arguments = {"texts": list(texts), "add_special_tokens": add_special_tokens}
        header, data = await self._do("encode_batch", arguments)
        ids = array.array("I", data).tolist()
        ends, encoded = 0, []
        for length in header["lengths"]:
            encoded.append(ids[ends : ends + length])
            ends += length
        return encoded

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        arguments = {"token_ids": list(token_ids), "skip_special_tokens": skip_special_tokens}
        return _text(*await self._do("decode", arguments))

    async def token_table(self) -> TokenTable:
        """Return the bytes of all tokens, for grammars.

        Raises:
            RequestError: the tokenizer does not decode token by token.
        """
        return TokenTable((await self._do("token_table", {}))[1])

    async def chat_text(
        self, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None, **options: Any
    ) -> str:
        """Return the text of a chat; see `Tokenizer.chat_text`.

        Args:
            chat_template: an untrusted template, rendered with limits of time and memory.

        Raises:
            RequestError: there is no template, it rejects these messages, or it exceeds a limit.
        """
        arguments = {"messages": messages, "chat_template": chat_template, **options}
        if chat_template is None:
            return _text(*await self._do("chat_text", arguments))
        try:
            return _text(*await self._do("chat_text", arguments, "untrusted"))
        except TimeoutError:
            sentence = f"the chat template was stopped: it ran for more than {TEMPLATE_TIMEOUT_S:g} s"
        except RequestFailedError:
            sentence = f"the chat template was stopped: it crashed, or used more than {TEMPLATE_MEMORY >> 20} MiB"
        raise RequestError(f"{sentence}; send a simpler one", "chat_template")

    async def compile_grammar(self, structured: StructuredOutputs) -> str:
        """Return the checked grammar of an output, in llguidance's format; see `grammar.compile`.

        Recently compiled or rejected grammars are cached.

        Raises:
            RequestError: the grammar is malformed, too large or unsatisfiable, its compilation exceeds a limit, or the
                tokenizer supports no grammars.
            OverloadedError: too many grammars wait.
            RequestFailedError: the vocabulary cannot be read.
        """
        return await self._grammars.get(structured, self._compile_grammar)

    async def _compile_grammar(self, structured: StructuredOutputs) -> str:
        param = f"structured_outputs.{structured.kind}"
        try:
            try:
                return await self._compile_in("grammars", structured, param)
            except TimeoutError:
                return await self._compile_in("slow", structured, param)
        except _BrokenError:
            raise
        except TimeoutError:
            sentence = f"compilation took longer than {COMPILE_TIMEOUT_S:g} s"
        except RequestFailedError:
            sentence = (
                f"compilation used more than {COMPILE_CPU_S} s of CPU time or {COMPILE_MEMORY >> 20} MiB, or crashed"
            )
        raise RequestError(f"the grammar is too complex: {sentence}; simplify it", param, TOO_COMPLEX)

    async def _compile_in(self, name: str, structured: StructuredOutputs, param: str) -> str:
        lane = self._lanes[name]
        if lane.max_jobs is not None and lane.waiting >= lane.max_jobs:
            raise OverloadedError(f"{lane.waiting} grammars are waiting for compilation; try again later", param)
        lane.waiting += 1
        try:
            return _text(*await self._do("compile_grammar", {"structured": structured}, name))
        finally:
            lane.waiting -= 1

    def close(self) -> None:
        """Kill the process and all workers."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def _do(
        self, method: str, arguments: Mapping[str, Any], confined: str | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Call a method of the tokenizer in a worker.

        Args:
            confined: a lane with limits; None: the lane is chosen by the job's size.

        Raises:
            RequestError: the method raised it.
            RequestFailedError: the method failed, or the worker died.
            TimeoutError: a job in a lane with limits exceeded the limit of time.
        """
        job = pickle.dumps((method, arguments))
        by_size = next((name for max_length, name in _LANES if len(job) <= max_length), "large")
        lane = self._lanes[confined or by_size]
        untrusted = confined is not None
        async with lane.lock:
            for attempt in (1, 2):
                began = time.monotonic()
                try:
                    header, data = await self._try(lane, job, untrusted)
                    break
                except (_WorkerGoneError, TimeoutError) as error:
                    if untrusted and isinstance(error, TimeoutError):
                        raise
                    late = time.monotonic() - began > _EARLY_S
                    if (untrusted and late) or attempt == 2 or self._closed:
                        raise RequestFailedError(_FAILED) from None
                    logger.warning("a tokenizer worker failed; retrying its job in a new worker")
        if "broken" in header:
            raise _BrokenError(header["broken"])
        if "failed" in header:
            raise RequestFailedError(_FAILED)
        if "error" in header:
            raise RequestError(header["error"], header["param"], header["code"])
        return header, data

    async def _try(self, lane: _Lane, job: bytes, untrusted: bool) -> tuple[dict[str, Any], bytes]:
        worker, lane.worker = lane.worker, None
        if worker is not None and worker.reader.at_eof():
            self._workers.discard(worker)
            worker.kill()
            worker = None
        if worker is None:
            worker = await self._fork(lane.fork)
        finished = False
        try:
            async with asyncio.timeout(lane.timeout):
                answer = await worker.do(job, _MAX_UNTRUSTED_BYTES if untrusted else None)
            finished = True
            return answer
        finally:
            if finished and lane.keeps:
                lane.worker = worker
            else:
                self._workers.discard(worker)
                worker.kill()

    async def _fork(self, limits: bytes) -> _Worker:
        """Return a new worker. Restarts the process that forks workers if it has died or hangs.

        Raises:
            _WorkerGoneError: no worker can be started.
        """
        async with self._starting:
            for attempt in (1, 2):
                if self._closed:
                    raise _WorkerGoneError
                try:
                    return await self._ask_for_worker(limits)
                except (OSError, EOFError):
                    if attempt == 2:
                        raise _WorkerGoneError from None
                logger.warning("cannot start a tokenizer worker; restarting the tokenizer process")
                assert self._process is not None and self._control is not None
                self._control.close()
                self._process.kill()
                await asyncio.to_thread(self._process.wait)
                try:
                    self.start()
                    await self._loaded()
                except StokerError as error:
                    logger.error("cannot reload the tokenizer: %s", error)
                    raise _WorkerGoneError from error
        raise AssertionError

    async def _ask_for_worker(self, limits: bytes) -> _Worker:
        assert self._control is not None, "the tokenizer is not loaded yet"
        parent_socket, worker_socket = socket.socketpair()
        with worker_socket:
            socket.send_fds(self._control, [limits], [worker_socket.fileno()])
        reader, writer = await asyncio.open_connection(sock=parent_socket)
        try:
            async with asyncio.timeout(_FORK_TIMEOUT_S):
                (pid,) = HELLO.unpack(await reader.readexactly(HELLO.size))
        except BaseException:
            writer.close()
            raise
        worker = _Worker(pid, reader, writer)
        self._workers.add(worker)
        return worker


async def _receive(connection: socket.socket, length: int) -> bytes:
    """Receive `length` bytes.

    Raises:
        EOFError: the connection ended before that.
    """
    loop, received = asyncio.get_running_loop(), bytearray()
    while len(received) < length:
        piece = await loop.sock_recv(connection, min(2**20, length - len(received)))
        if not piece:
            raise EOFError
        received += piece
    return bytes(received)


def _text(header: Mapping[str, Any], data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
