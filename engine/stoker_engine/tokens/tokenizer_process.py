"""The tokenizer's process as the server sees it: jobs in, answers out, never holding up the event loop.

Jobs wait in lanes by their size, each of which has a worker of its own: what is small never waits for what is large.
A job that nobody waits for any more is not started, or ended with its worker; the next one gets a new worker. Lanes of
larger jobs, whose workers have grown, begin each with a new one too, so that memory goes back to the system.

    lane         jobs, one at a time
    small        up to 64 KiB; its worker stays
    medium       up to 1 MiB
    large        more
    untrusted    a template that came with a request, with limits on time and memory
    grammars     what outputs must look like, in the same way; they are short, and only so many may wait
    slow         those that did not become one in that time
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

#: What runs in the process. `-P`: what lies in the working directory is not imported.
PROGRAM: Final = ("-P", "-m", "stoker_engine.tokens.tokenizer_worker")

#: Seconds, and bytes of memory, that rendering a request's own chat template may take.
TEMPLATE_TIMEOUT_S: Final = 5.0
TEMPLATE_MEMORY: Final = 512 * 1024**2

#: Seconds within which the death of a worker that has limits may be another's doing, so that its job is tried again.
#: What takes too much dies later, and would again.
_EARLY_S: Final = 1.0

#: Most bytes that an answer of a worker in which a stranger's template ran may have.
_MAX_UNTRUSTED_BYTES = 256 * 1024**2

#: Seconds after which a process that forks no worker counts as stopped; it may read the vocabulary for grammars first.
_FORK_TIMEOUT_S = 30.0

#: The code of what takes too much to be compiled.
TOO_COMPLEX: Final = "grammar_too_complex"

_FAILED = "the tokenizer failed at this request; see the server's log"

_LANES = ((2**16, "small"), (2**20, "medium"))


class _BrokenError(RequestFailedError):
    """Workers of this kind fail at every job."""


class _WorkerGoneError(Exception):
    """A worker, or what forks workers, is there no more."""


@dataclass(eq=False)
class _Worker:
    """One worker and the way to it."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def do(self, job: bytes, max_bytes: int | None) -> tuple[dict[str, Any], bytes]:
        """The header and the data of the answer to `job`.

        Raises:
            _WorkerGoneError: it died meanwhile, or wrote what it must not.
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
        """Ends it, whatever it does."""
        if not self.reader.at_eof():  # else it is gone, and its id may be another's
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self.writer.close()


@dataclass
class _Lane:
    """Jobs of one size, one after the other.

    Attributes:
        timeout: seconds that a job may take; beyond what the slowest needs, unless its worker is stopped.
        keeps: whether its worker stays for the next job.
        fork: limits of its workers; see `tokenizer_worker.FORK`.
        max_jobs:how many jobs may wait and be worked on, where that is limited; and how many do.
    """

    timeout: float
    keeps: bool = False
    fork: bytes = FORK.pack(0, 0, 5, False)
    max_jobs: int | None = None
    waiting: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    worker: _Worker | None = None


class TokenizerProcess:
    """A tokenizer in a process of its own, for one event loop.

    Attributes:
        vocabulary: what is needed of it here, once it is loaded.
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
        """Starts the process; `load` waits for it. Any thread may call this, before `load`.

        Raises:
            OSError: the system has no process or memory left.
        """
        parent_socket, child_socket = socket.socketpair()
        with child_socket:
            self._process = self._run(child_socket.fileno())
        parent_socket.setblocking(False)
        self._control = parent_socket

    async def load(self) -> Vocabulary:
        """Waits until the process has loaded the tokenizer, and starts it where `start` has not.

        Raises:
            ModelError: there is no tokenizer, or it cannot be read.
            ArgumentError: the chat template's file cannot be read.
        """
        if self._process is None:
            self.start()
        self.vocabulary = await self._loaded()
        small = self._lanes["small"]
        with contextlib.suppress(_WorkerGoneError):  # else the first request asks again
            small.worker = await self._fork(small.fork)
        return self.vocabulary

    async def _loaded(self) -> Vocabulary:
        assert self._process is not None and self._control is not None, "the process is not started yet"
        try:
            (length,) = JOB.unpack(await _receive(self._control, JOB.size))
            loaded = pickle.loads(await _receive(self._control, length))
        except (OSError, EOFError):
            code = await asyncio.to_thread(self._process.wait)
            raise ModelError(f"the tokenizer's process died while it loaded (exit code {code})") from None
        except BaseException:
            self._process.kill()  # what it says then would be taken for something else
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
            process_group=0,  # Ctrl-C in a terminal is for the server
        )

    async def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The tokens of texts.

        Raises:
            RequestError: one of them is no Unicode.
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
        """The text of tokens."""
        arguments = {"token_ids": list(token_ids), "skip_special_tokens": skip_special_tokens}
        return _text(*await self._do("decode", arguments))

    async def token_table(self) -> TokenTable:
        """The bytes of all tokens, for grammars.

        Raises:
            RequestError: the tokenizer does not write text token by token.
        """
        return TokenTable((await self._do("token_table", {}))[1])

    async def chat_text(
        self, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None, **options: Any
    ) -> str:
        """A chat as the template writes it; see `Tokenizer.chat_text`.

        Args:
            chat_template: a stranger's: it is rendered with limits on time and memory.

        Raises:
            RequestError: there is no template, it refuses these messages, or it takes too much.
        """
        arguments = {"messages": messages, "chat_template": chat_template, **options}
        if chat_template is None:
            return _text(*await self._do("chat_text", arguments))
        try:
            return _text(*await self._do("chat_text", arguments, "untrusted"))
        except TimeoutError:
            sentence = f"the chat template was stopped: it took longer than {TEMPLATE_TIMEOUT_S:g} s"
        except RequestFailedError:
            sentence = f"the chat template was stopped: it crashed, or took more than {TEMPLATE_MEMORY >> 20} MiB"
        raise RequestError(f"{sentence}; send a simpler one", "chat_template")

    async def compile_grammar(self, structured: StructuredOutputs) -> str:
        """The grammar that an output must keep, checked, as llguidance reads it; see `grammar.compile`.

        What was compiled, or refused, lately is known.

        Raises:
            RequestError: it is malformed, too large, takes too much, or no output keeps it.
            OverloadedError: too many wait.
            RequestFailedError: none can be compiled.
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
            sentence = f"it took longer than {COMPILE_TIMEOUT_S:g} s"
        except RequestFailedError:
            sentence = (
                f"it took more than {COMPILE_CPU_S} s of processor time or {COMPILE_MEMORY >> 20} MiB, or crashed"
            )
        raise RequestError(f"this could not be compiled: {sentence}; send something simpler", param, TOO_COMPLEX)

    async def _compile_in(self, name: str, structured: StructuredOutputs, param: str) -> str:
        lane = self._lanes[name]
        if lane.max_jobs is not None and lane.waiting >= lane.max_jobs:
            raise OverloadedError(f"{lane.waiting} grammars wait to be compiled; try again later", param)
        lane.waiting += 1
        try:
            return _text(*await self._do("compile_grammar", {"structured": structured}, name))
        finally:
            lane.waiting -= 1

    def close(self) -> None:
        """Ends the process, and all work."""
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
        """Has a worker call a method of the tokenizer.

        Args:
            confined: the lane of what may do harm; else its size says which.

        Raises:
            RequestError: what the method raised.
            RequestFailedError: the worker died of it, or fails at every job.
            TimeoutError: it took too long, in a lane of what may do harm.
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
                    logger.warning("a worker of the tokenizer died; another one does its job")
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
        """A new worker; where what forks them is gone, that is started again first.

        Raises:
            _WorkerGoneError: it cannot be had.
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
                logger.warning("the tokenizer's process died; it is started again")
                assert self._process is not None and self._control is not None
                self._control.close()
                self._process.kill()
                await asyncio.to_thread(self._process.wait)
                try:
                    self.start()
                    await self._loaded()
                except StokerError as error:
                    logger.error("the tokenizer cannot be loaded again: %s", error)
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
    """`length` bytes.

    Raises:
        EOFError: there are not so many.
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
