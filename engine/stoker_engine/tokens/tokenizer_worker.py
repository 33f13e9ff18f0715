"""The tokenizer's process: loads the tokenizer, then forks a worker for each socket it is handed.

    server ──control socket──► tokenizer process ──fork──► worker ◄──its own socket── server

A worker shares the loaded tokenizer's memory and does one job after the other, until its socket is closed. So work can
be ended by ending its worker, what it took of memory is gone with it, and a template of a stranger runs where it can
neither hold up nor starve anybody. The process has a single thread, without which nobody may fork.

    job       length, pickle of (method of `Tokenizer`, or of `GrammarCompiler`; arguments)
    answer    length of the header, of the data; header as JSON: {"text": true}, {"table": true}, {"lengths": …} or an
              error (failed: at this job; broken: at every one of this method); data

An answer is no pickle: it may come from a worker in which a stranger's template ran.
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

#: Length of a job; lengths of an answer's header and data; what a new worker says first, its process id.
JOB: Final = struct.Struct("!Q")
ANSWER: Final = struct.Struct("!QQ")
HELLO: Final = struct.Struct("!Q")

#: What the control socket says along with a worker's own socket: bytes of memory that it may take beyond what it shares
#: and seconds of CPU time (0: no limit), how much less urgent than the rest of the server it is, and whether it is for
#: grammars.
FORK: Final = struct.Struct("!QQB?")


def main(argv: list[str]) -> int:
    """Runs the process.

    Args:
        argv: the control socket's file descriptor, the log's format, the tokenizer's path, and the chat template.
    """
    from stoker_common.errors import ArgumentError, StokerError
    from stoker_engine import logs
    from stoker_engine.tokens.tokenizer import Tokenizer

    for signum in (signal.SIGINT, signal.SIGTERM):  # the server's business
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
    _trim()  # loading takes more than twice what is kept
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers leave no zombies
    with contextlib.suppress(OSError):
        _fork_workers(control, tokenizer)
    return 0


def _send_loaded(control: socket.socket, loaded: object) -> None:
    data = pickle.dumps(loaded)
    control.sendall(JOB.pack(len(data)) + data)


def _warm_up_templates() -> None:
    """Has Jinja and the clock read what they read when they are first needed: a worker that may open no files could
    not."""
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
    """What stands for a compiler that could not be made."""

    def compile_grammar(self, structured: object) -> str:
        from stoker_common.errors import RequestFailedError

        raise RequestFailedError("grammars cannot be compiled for this model; see the server's log")


def _grammar_compiler(tokenizer: Tokenizer) -> object:
    """What compiles grammars, made when the first one comes; forks share it."""
    from stoker_engine.tokens.grammar_compiler import GrammarCompiler

    try:
        compiler = GrammarCompiler(tokenizer)
    except Exception:  # its jobs fail, and no others
        logger.exception("the vocabulary cannot be read for grammars")
        return _NoCompiler()
    gc.collect()
    gc.freeze()
    _trim()
    return compiler


def _work(tokenizer: object, connection: socket.socket, memory: int, cpu_seconds: int, niceness: int) -> None:
    """Does the jobs of one worker; does not return."""
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
    except OSError:  # nobody wants the answer any more
        code = 0
    finally:
        os._exit(code)


def _confine(memory: int, cpu_seconds: int) -> None:
    """Limits this process, for good. It can open nothing more."""
    shared = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    Path("/proc/self/oom_score_adj").write_text("1000")  # before anything else, if memory runs out
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
    except Exception as error:  # ours, or memory ran out: nobody else is hurt
        if not isinstance(error, MemoryError):
            logger.exception("the tokenizer failed at a request")
        header = {"failed": True}
    encoded = json.dumps(header).encode()
    connection.sendall(ANSWER.pack(len(encoded), len(data)) + encoded)
    connection.sendall(data)


def _trim() -> None:
    """Gives freed memory back to the system, where the C library can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
