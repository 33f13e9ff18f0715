"""The tokenizer process: loads the tokenizer, then forks a worker for each socket that it receives.

    server ──control socket──► tokenizer process ──fork──► worker ◄──its own socket── server

A worker shares the loaded tokenizer's memory and runs jobs sequentially until its socket is closed. Killing the worker
therefore stops a job and frees its memory, and an untrusted template cannot block or starve the server. The process has
a single thread, because forking a process with several threads is unsafe.

    job       length, pickle of (method of `Tokenizer`, or of `GrammarCompiler`; arguments)
    result    length of the header, length of the data; header as JSON: {"text": true}, {"table": true},
              {"lengths": …} or an error (failed: this job; broken: all jobs of this method); data

A result is not a pickle, because it may come from a worker that ran an untrusted template.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import json
import logging
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

if TYPE_CHECKING:
    from stoker_engine.tokens.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

#: Length of a job; lengths of a result's header and data; pid, the first message of a new worker.
JOB: Final = struct.Struct("!Q")
ANSWER: Final = struct.Struct("!QQ")
HELLO: Final = struct.Struct("!Q")

#: Message on the control socket, sent with a worker's socket: limit of memory beyond the shared part, in bytes, and of
#: CPU time, in seconds (0: no limits), niceness relative to the server, and whether the worker compiles grammars.
FORK: Final = struct.Struct("!QQB?")


def main(argv: list[str]) -> int:
    """Run the process.

    Args:
        argv: the control socket's file descriptor, the log format, the tokenizer's path, and optionally the chat
            template.
    """
    from stoker_common.errors import ArgumentError, StokerError
    from stoker_engine import logs
    from stoker_engine.tokens.tokenizer import Tokenizer

    for signum in (signal.SIGINT, signal.SIGTERM):  # the server stops this process
        signal.signal(signum, signal.SIG_IGN)
    logs.configure(argv[1])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive a fork
    control = socket.socket(fileno=int(argv[0]))
    try:
        tokenizer = Tokenizer.load(Path(argv[2]), argv[3] if len(argv) > 3 else None)
    except StokerError as error:
        argument = (error.argument, error.message) if isinstance(error, ArgumentError) else (str(error),)
        _send_loaded(control, (type(error), argument))
        return 2
    _send_loaded(control, tokenizer.vocabulary)
    _warm_up_templates()
    gc.collect()
    gc.freeze()
    _trim()  # loading allocates more than twice the memory that is kept
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers leave no zombies
    with contextlib.suppress(OSError):
        _fork_workers(control, tokenizer)
    return 0


def _send_loaded(control: socket.socket, loaded: object) -> None:
    data = pickle.dumps(loaded)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server has ended, so there is no job either
        control.sendall(JOB.pack(len(data)) + data)


def _warm_up_templates() -> None:
    """Let Jinja and the clock read the files that they need: a worker with limits cannot open files."""
    from stoker_common.errors import RequestError
    from stoker_engine.tokens import chat_template

    for template in ("{{ strftime_now('%c') }}{{ 1 / 0 }}", "{% for %}", "{{ {}.a.b | tojson }}"):
        with contextlib.suppress(RequestError):
            chat_template.render(template, [{"role": "user", "content": ""}])


def _fork_workers(control: socket.socket, tokenizer: Tokenizer) -> None:
    grammars: object = None
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, FORK.size, 1)
        if not message:
            return
        memory, cpu_seconds, niceness, compiles = FORK.unpack(message)
        if compiles and grammars is None:
            grammars = _grammar_compiler(tokenizer)
        if os.fork() == 0:
            control.close()
            worker = socket.socket(fileno=descriptors[0])
            _work(grammars if compiles else tokenizer, worker, memory, cpu_seconds, niceness)
        os.close(descriptors[0])


class _NoCompiler:
    """Replaces a compiler that could not be created; fails all jobs."""

    def compile_grammar(self, structured: object) -> str:
        from stoker_common.errors import RequestFailedError

        raise RequestFailedError("structured outputs are unavailable for this model; see the server's log")


def _grammar_compiler(tokenizer: Tokenizer) -> object:
    """Create the grammar compiler, whose memory later forks share."""
    from stoker_engine.tokens.grammar_compiler import GrammarCompiler

    try:
        compiler = GrammarCompiler(tokenizer)
    except Exception:  # only grammar jobs fail
        logger.exception("cannot read the vocabulary for structured outputs")
        return _NoCompiler()
    gc.collect()
    gc.freeze()
    _trim()
    return compiler


def _work(tokenizer: object, connection: socket.socket, memory: int, cpu_seconds: int, niceness: int) -> None:
    """Run a worker's jobs. Does not return."""
    code = 1
    try:
        os.nice(niceness)
        connection.sendall(HELLO.pack(os.getpid()))
        if memory:
            _confine(memory, cpu_seconds)
        jobs = connection.makefile("rb")
        while (job := _read(jobs)) is not None:
            _answer(connection, tokenizer, job)
        code = 0
    except OSError:  # the server has closed the socket
        code = 0
    finally:
        os._exit(code)


def _confine(memory: int, cpu_seconds: int) -> None:
    """Limit this process's memory and CPU time permanently, and keep it from opening files and, unless it is root, from
    starting processes."""
    shared = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    Path("/proc/self/oom_score_adj").write_text("1000")  # the OOM killer selects this process first
    for limit, maximum in (
        (resource.RLIMIT_AS, shared + memory),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(limit, (maximum, maximum))


def _read(jobs: BinaryIO) -> bytes | None:
    head = jobs.read(JOB.size)
    if len(head) < JOB.size:
        return None
    (length,) = JOB.unpack(head)
    job = jobs.read(length)
    return job if len(job) == length else None


def _answer(connection: socket.socket, tokenizer: object, job: bytes) -> None:
    from stoker_common.errors import RequestError, RequestFailedError
    from stoker_engine.grammar.token_table import TokenTable

    data: bytes = b""
    out_of_memory = False
    try:
        method, arguments = pickle.loads(job)
        del job
        result = getattr(tokenizer, method)(**arguments)
        if isinstance(result, str):
            header: dict[str, object] = {"text": True}
            data = result.encode("utf-8", "surrogatepass")
        elif isinstance(result, TokenTable):
            header, data = {"table": True}, result.data
        else:
            header = {"lengths": [len(ids) for ids in result]}
            data = array.array("I", [token_id for ids in result for token_id in ids]).tobytes()
    except RequestFailedError as error:
        header = {"broken": error.message}
    except RequestError as error:
        header = {"error": error.message, "param": error.param, "code": error.code}
    except MemoryError:
        header, out_of_memory = {"failed": True}, True
    except Exception:  # a bug: only this job fails
        logger.exception("the tokenizer failed for a request")
        header = {"failed": True}
    if out_of_memory:  # the job's memory is free now
        logger.error("the tokenizer ran out of memory for a request")
    encoded = json.dumps(header).encode()
    connection.sendall(ANSWER.pack(len(encoded), len(data)) + encoded)
    connection.sendall(data)


def _trim() -> None:
    """Return freed memory to the system, if the C library supports it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
