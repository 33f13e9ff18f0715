"""The process of one rank: loads its part of the model, runs each step that it receives, and sleeps in between.

When the executor shuts down its sending side of the pipe, the process ends after the messages already received; when
the executor's end is gone, it ends immediately. An error in a step ends the process: other ranks wait for it in the
middle of a layer, and later steps would compute wrong results.
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
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final

from stoker_common.errors import AdapterError, StokerError
from stoker_common.subprocesses.death import Died
from stoker_common.subprocesses.lifeline import die_with, wait_for_hangup
from stoker_common.subprocesses.load_failed import LoadFailed
from stoker_engine import logs
from stoker_engine.exec.adapters import load_adapter
from stoker_engine.exec.rank_messages import (
    AdapterLoaded,
    AllLoaded,
    Collect,
    DropAdapter,
    LoadAdapter,
    Loaded,
    Lost,
    Prepare,
    Prepared,
    Progress,
    Setup,
)
from stoker_engine.grammar.token_table import TokenTable
from stoker_engine.parallel.processors import ProcessorShare, take_share

if TYPE_CHECKING:
    from stoker_engine.contract.engine_args import EngineArgs
    from stoker_engine.core.adapter import AdapterSource
    from stoker_engine.exec.runner import Runner
    from stoker_engine.models.loading.load_progress import OnProgress
    from stoker_engine.parallel.join import Joined
    from stoker_engine.parallel.rank_groups import RankGroups
    from stoker_engine.parallel.shm_communicator import SharedMemory

logger = logging.getLogger(__name__)

#: Python's thread switch interval in seconds, a tenth of the default, because adapters are read during steps.
_SWITCH_S: Final = 0.0005

#: Minimum interval between two progress messages, in seconds; the last one is always sent.
_PROGRESS_S: Final = 0.2

#: Guards the pipe, which the threads of grammars and adapters share with the steps.
_sending: Final = threading.Lock()


def main(argv: list[str]) -> int:
    """Run the process.

    Args:
        argv: this rank's number, which is shown in process lists; file descriptor of the pipe; format of the log; pid
            of the process to die with (0: none).
    """
    pipe, log_format, parent = int(argv[1]), argv[2], int(argv[3])
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    die_with(parent)
    threading.Thread(target=_end_with, args=(pipe,), name="lifeline", daemon=True).start()
    connection = Connection(pipe)
    setup: Setup = pickle.loads(connection.recv_bytes())
    rank, layout = setup.rank, setup.layout
    # All ranks would log the same information, so only rank 0 logs it. Warnings may concern any rank.
    logs.configure(log_format, logging.INFO if rank == 0 else logging.WARNING, **setup.labels, rank=rank)
    sys.setswitchinterval(_SWITCH_S)
    share = take_share(*setup.neighbours, on_cpu=setup.on_cpu)  # before torch and the kernels start threads
    from stoker_engine.parallel.communicator import RankLostError  # torch: seconds

    try:
        _send(connection, Progress(0, 0))
        args = pickle.loads(connection.recv_bytes())  # sent once all ranks have started
        joined = _join(setup, share)
        runner = _load(connection, args, joined.groups, setup.device)
        if runner is None:
            return 2
        _run(connection, runner, joined, answers=rank == layout.first_of_last_stage)
        runner.graphs = None  # NCCL closes a communicator only after the graphs that captured its operations
        joined.close()
    except RankLostError as error:
        _send_last(connection, Lost(str(error)))
        return 1
    except BaseException as error:
        logger.exception("this rank failed with an error")
        _send_last(connection, Died.of(error))
        return 1
    return 0


def _join(setup: Setup, share: ProcessorShare) -> Joined:
    from stoker_engine.parallel.device import limit_threads
    from stoker_engine.parallel.join import join

    limit_threads(share.threads)
    return join(setup.rank, setup.layout, setup.rendezvous, setup.timeout_s, _shared_memory(setup, share))


def _shared_memory(setup: Setup, share: ProcessorShare) -> SharedMemory | None:
    if setup.region is None:
        return None
    from stoker_engine.kernels.cpu.library import library
    from stoker_engine.parallel.shm_communicator import SharedMemory

    if share.is_crowded:  # spinning ranks would take processors from the others
        return SharedMemory(setup.region, library(), spin_us=0)
    return SharedMemory(setup.region, library())


def _load(connection: Connection, args: EngineArgs, groups: RankGroups, device: int) -> Runner | None:
    """Load this rank's part of the model. None: it failed, and the error has been reported."""
    from stoker_engine.exec.build_runner import build_runner
    from stoker_engine.models.checkpoint import find_checkpoint
    from stoker_engine.parallel.device import resolve_device, use_device

    try:
        use_device(resolve_device(args), device)
        runner = build_runner(args, find_checkpoint(args), _progress(connection), groups)
    except StokerError as error:
        _send_last(connection, LoadFailed.of(error))
        return None
    gc.collect()
    gc.freeze()  # loaded objects are permanent: exclude them from collections between steps
    _send(connection, Loaded(runner.plan, runner.device.type == "cpu"))
    return runner


def _run(connection: Connection, runner: Runner, joined: Joined, answers: bool) -> None:
    """Process messages until the pipe is closed. Only the rank that `answers` sends the results of steps."""
    waits = runner.device.type == "cpu"  # each step is run at once; otherwise the host only launches it
    # Messages are read while a step runs. Otherwise a large step and a large result could deadlock in the pipe.
    inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), name="inbox", daemon=True).start()
    loader = ThreadPoolExecutor(1, "adapters")  # its thread starts with the first load
    while (data := inbox.get()) is not None:
        message = pickle.loads(data)
        if isinstance(message, AllLoaded):
            joined.settle()
        elif isinstance(message, TokenTable):
            runner.grammars.set_token_table(message)
        elif isinstance(message, Prepare):
            prepared = runner.grammars.prepare(message.grammar)
            prepared.add_done_callback(partial(_report_prepared, connection, message.number))
        elif isinstance(message, LoadAdapter):
            loader.submit(_load_adapter, connection, runner, message.source)
        elif isinstance(message, DropAdapter):
            assert runner.adapters is not None, "it is not loaded"
            runner.adapters.drop(message.number)
        elif isinstance(message, Collect) or waits:
            result = runner.run(message) if waits else runner.collect()
            if answers:
                _send(connection, result)
        else:
            runner.launch(message)


def _report_prepared(connection: Connection, grammar_id: int, prepared: Future[object]) -> None:
    """Send whether a grammar was compiled. May run in the thread that compiled it."""
    error = prepared.exception()
    _send(connection, Prepared(grammar_id, None if error is None else str(error)))


def _load_adapter(connection: Connection, runner: Runner, source: AdapterSource) -> None:
    """Load an adapter, in the loader's thread, and report the result. Any error affects only this adapter."""
    try:
        answer = AdapterLoaded(source.number, load_adapter(runner.adapters, source))
    except AdapterError as error:
        answer = AdapterLoaded(source.number, None, str(error))
    except Exception:
        logger.exception("LoRA adapter %s cannot be loaded", source.name)
        answer = AdapterLoaded(source.number, None, "the adapter cannot be loaded; see the log")
    _send(connection, answer)


def _receive(connection: Connection, inbox: queue.SimpleQueue[bytes | None]) -> None:
    while True:
        try:
            inbox.put(connection.recv_bytes())
        except (EOFError, OSError):
            inbox.put(None)
            return


def _progress(connection: Connection) -> OnProgress:
    sent = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal sent
        if (now := time.monotonic()) >= sent + _PROGRESS_S or done == total > 0:
            sent = now
            _send(connection, Progress(done, total))

    return progress


def _send(connection: Connection, message: Any) -> None:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    with _sending:
        connection.send_bytes(data)


def _send_last(connection: Connection, message: Any) -> None:
    with contextlib.suppress(Exception):
        _send(connection, message)


def _end_with(pipe: int) -> None:
    """Wait until the other end of the pipe is closed, then end this process at once, even in the middle of a step."""
    wait_for_hangup(pipe)
    os._exit(0)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)  # immediately: the teardown of torch and its threads takes seconds
