"""The program of one of several front ends: the HTTP server, with engines that the supervisor owns."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys

from stoker_common.errors import StokerError
from stoker_common.subprocesses.lifeline import die_with
from stoker_engine import logs
from stoker_engine.imports import collector_off

logger = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Run the process; return its exit code (1: the front end failed).

    Args:
        argv: file descriptors of the control pipe, of the socket for links to engines, of the shared counts and of the
            bound socket; pid of the supervisor.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):  # until the server handles them: no client is served yet
        signal.signal(signum, lambda *_: os._exit(0))
    control, links, counts, bound, supervisor = map(int, argv)
    die_with(supervisor)
    with collector_off():  # imported here, because it takes seconds
        from stoker_engine.async_llm import AsyncLLM
        from stoker_engine.server.front_ends.control import ControlPipe
        from stoker_engine.server.front_ends.supervised import Supervised
        from stoker_engine.server.http.http_server import serve

    supervised = Supervised(ControlPipe(socket.socket(fileno=control)), socket.socket(fileno=links), counts)
    args = supervised.start.args
    logs.configure(args.frontend.log_format, front_end=supervised.index)
    try:
        client = AsyncLLM(
            args.engine,
            chat_template=args.frontend.chat_template,
            step_timeout=args.frontend.step_timeout,
            log_format=args.frontend.log_format,
            start=supervised.link,
            files=supervised.files,
            min_engines=supervised.start.min_engines,
        )
        try:
            serve(args, client, socket.socket(fileno=bound), supervised)
        finally:
            client.shutdown()
    except StokerError as error:
        supervised.report_failure(error)
        return 1
    except Exception:
        logger.exception("the front end failed with an error")
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)  # immediately: threads wait for messages
