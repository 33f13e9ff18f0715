"""The engine process: loads the model, runs steps while there is work, and otherwise sleeps on its inbox.

"The server" below is the parent, which may also be a script. The process ends when the pipe is closed, because the
server has closed it or has ended; the server also handles SIGINT and SIGTERM. An error in a step ends the process,
which the server detects and reports: no request is answered from an undefined state.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stoker_common.errors import AdapterError, EngineDeadError, StokerError
from stoker_common.subprocesses.death import Died
from stoker_common.subprocesses.lifeline import die_with, has_hung_up
from stoker_common.subprocesses.load_failed import LoadFailed
from stoker_common.subprocesses.process_start import process_start
from stoker_engine import logs
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.adapter import AdapterSource, LoadedAdapter
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.laps import Laps
from stoker_engine.core.outputs import StepOutputs, TokenDelta
from stoker_engine.exec.supervision import Supervision
from stoker_engine.grammar.token_table import TokenTable
from stoker_engine.imports import collector_off
from stoker_engine.nodes.head import Head
from stoker_engine.processes.device_assignment import assign_devices
from stoker_engine.processes.front_end_links import FrontEndGone, FrontEndLinks
from stoker_engine.processes.heartbeat import Heartbeat, Phase
from stoker_engine.processes.messages import (
    Abort,
    AdapterReply,
    LoadAdapter,
    RemoveAdapter,
    ServeFrontEnds,
    Stop,
)
from stoker_engine.processes.server_link import ServerLink

if TYPE_CHECKING:
    from stoker_engine.engine import Engine

logger = logging.getLogger(__name__)

Inbox = queue.SimpleQueue[Any]

#: Python's thread switch interval in seconds, a tenth of the default, because adapters are read during steps.
_SWITCH_S: Final = 0.0005


def main(argv: list[str]) -> int:
    """Run the process; return its exit code (2: the engine cannot be loaded, 1: another error).

    Args:
        argv: file descriptors of the pipe and of the heartbeat; format of the log; pid of the process to die with (0:
            none); step timeout in seconds; index of the engine (empty: the only one); file descriptor of the socket
            over which links to front ends come (empty: the server's process is the only one).
    """
    pipe, heartbeat_fd, log_format, parent = int(argv[0]), int(argv[1]), argv[2], int(argv[3])
    step_timeout, engine_index = float(argv[4]), int(argv[5]) if argv[5] else None
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    die_with(parent)
    status = Heartbeat(heartbeat_fd)
    status.enter(Phase.STARTING)
    connection = Connection(pipe)
    inbox: Inbox = queue.SimpleQueue()
    at_end: list[Callable[[], None]] = []
    threading.Thread(target=_receive, args=(connection, inbox, at_end), name="inbox", daemon=True).start()
    server = ServerLink(connection, status, FrontEndLinks(int(argv[6]), inbox) if argv[6] else None)
    supervision = Supervision(
        step_timeout, log_format, engine_index, on_death=inbox.put, on_missing_ranks=server.report_missing_ranks
    )
    logs.configure(log_format, **supervision.labels)
    sys.setswitchinterval(_SWITCH_S)
    try:
        engine = _load(server, inbox, status, supervision, at_end)
        if engine is None:
            return 2
        _run(engine, server, inbox, status)
    except BaseException as error:
        if not isinstance(error, EngineDeadError):  # otherwise another process failed, which the server reports
            logger.exception("the engine failed with an error")
        with contextlib.suppress(Exception):
            server.send(Died.of(error))
        return 1
    return 0


def _load(
    server: ServerLink,
    inbox: Inbox,
    status: Heartbeat,
    supervision: Supervision,
    at_end: list[Callable[[], None]],
) -> Engine | None:
    """Load the engine. None: it failed, and the error was sent to the server. Appends functions to `at_end`, see
    `_receive`."""
    laps = Laps()
    laps.ended.append(("server", process_start()))
    with collector_off():
        from stoker_engine.engine import Engine  # imports torch (seconds) while the server finds the model's files

    laps.end("imports")
    status.enter(Phase.WAITING)
    args = inbox.get()
    laps.end("files")
    if not isinstance(args, EngineArgs):
        raise _unexpected(args)
    status.enter(Phase.LOADING)
    engine_index = supervision.engine or 0
    head: Head | None = None

    try:
        assign_devices(args, engine_index)
        if (head := Head.of(args, Path(args.model), engine_index, server.report_waiting)) is not None:
            at_end.append(head.dismiss)
        engine = Engine.from_args(args, lambda: status.enter(Phase.LOADING), supervision, head)
    except EngineDeadError:  # another attempt may succeed
        raise
    except StokerError as error:
        if head is not None:
            head.dismiss(str(error))
        server.send(LoadFailed.of(error))
        return None
    gc.collect()
    gc.freeze()  # loaded objects are permanent: exclude them from collections between steps
    server.send(replace(engine.info, load_laps=(*laps.ended, *engine.info.load_laps)))
    return engine


def _run(engine: Engine, server: ServerLink, inbox: Inbox, status: Heartbeat) -> None:
    while True:
        _handle_message(engine, server, inbox, status)
        server.send_outputs(engine.step())


def _handle_message(engine: Engine, server: ServerLink, inbox: Inbox, status: Heartbeat) -> None:
    """Process the messages in the inbox, and sleep on it while there is no work. Only the sleep counts as idle."""
    while True:
        has_work = engine.has_work
        if not has_work:
            status.enter(Phase.IDLE)
        try:
            message = inbox.get(block=not has_work)
        except queue.Empty:
            status.enter(Phase.STEPPING)
            return
        status.enter(Phase.STEPPING)
        if isinstance(message, EngineRequest):
            _add(engine, server, message)
        elif isinstance(message, Abort):
            engine.abort(message.request_id)
            server.drop(message.request_id)
        elif isinstance(message, Stop):
            engine.stop(message.request_id, message.index)
        elif isinstance(message, TokenTable):
            engine.set_token_table(message)
        elif isinstance(message, LoadAdapter):
            _load_adapter(engine, server, message.source)
        elif isinstance(message, RemoveAdapter):
            engine.remove_adapter(message.number)
        elif isinstance(message, ServeFrontEnds):
            server.serve_front_ends(engine.info)
        elif isinstance(message, FrontEndGone):
            for request_id in server.forget(message):
                engine.abort(request_id)
        else:
            raise _unexpected(message)


def _add(engine: Engine, server: ServerLink, request: EngineRequest) -> None:
    try:
        engine.add(request)
    except EngineDeadError:
        raise
    except Exception:  # an internal error, since requests are validated; affects only this request
        logger.exception("the engine cannot take request %s", request.id)
        engine.abort(request.id)
        failed = [TokenDelta(request.id, i, [], FinishReason.ERROR) for i in range(request.num_sequences)]
        server.send_outputs(StepOutputs(failed, None))
        server.drop(request.id)


def _load_adapter(engine: Engine, server: ServerLink, source: AdapterSource) -> None:
    try:
        ready = engine.load_adapter(source)
    except AdapterError as error:
        server.send(AdapterReply(source.number, None, str(error)))
    else:  # completed by a later step
        ready.add_done_callback(partial(_report_adapter, server, source.number))


def _report_adapter(server: ServerLink, number: int, ready: Future[LoadedAdapter]) -> None:
    error = ready.exception()
    reply = AdapterReply(number, ready.result(), None) if error is None else AdapterReply(number, None, str(error))
    server.send(reply)


def _unexpected(message: Any) -> BaseException:
    """Return the exception for an unexpected item of the inbox, which may be an error of `_receive`."""
    return message if isinstance(message, BaseException) else TypeError(f"{type(message).__name__} is no message")


def _receive(connection: Connection, inbox: Inbox, at_end: list[Callable[[], None]]) -> None:
    """Move messages into the inbox, so that the server never waits for a step. When the pipe is closed, end this
    process; if the server is alive, call the functions in `at_end` before."""
    while True:
        try:
            data = connection.recv_bytes()
        except (EOFError, OSError):
            if not has_hung_up(connection.fileno()):
                for call in at_end:
                    call()
            os._exit(0)  # immediately, even in the middle of a step: the results are not needed any more
        try:
            inbox.put(pickle.loads(data))
        except BaseException as error:  # the main loop raises it
            inbox.put(error)
            return


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)  # immediately: the teardown of torch and its threads takes seconds, and the server waits for the end
