"""``stoker serve MODEL``: the engine behind HTTP. The server answers at once, the engine loads meanwhile.

With ``--headless`` it serves nothing: it runs ranks for the server on node 0.

Where it ends because it cannot serve, it leaves its last words behind (`contract.termination_message`).
"""

from __future__ import annotations

import os
import signal

from stoker_common.errors import StokerError
from stoker_engine import logs
from stoker_engine.cli import command_line, termination_log
from stoker_engine.contract.serve_args import ServeArgs
from stoker_engine.contract.termination_message import Reason, TerminationMessage
from stoker_engine.imports import collector_off


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code (2: a wrong argument or MODEL, 1: it cannot serve, 0: asked to stop)."""
    # As PID 1 of a container a process that does not handle SIGTERM cannot be stopped before it serves. Nobody is
    # served yet, the engine's process ends with this one, and an exception could be swallowed by what is imported.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    return command_line.run("stoker serve", lambda: _serve_or_report(argv))


def _serve_or_report(argv: list[str]) -> int:
    try:
        _serve(argv)
    except KeyboardInterrupt:
        pass  # asked to stop
    except StokerError as error:
        termination_log.write(TerminationMessage.of(error, otherwise=Reason.START_ERROR))
        raise
    except Exception as error:
        termination_log.write(TerminationMessage.of(error))
        raise
    return 0


def _serve(argv: list[str]) -> None:
    arguments = command_line.with_model_flag(argv)
    command_line.check_flags(ServeArgs.parser(), arguments)
    args = ServeArgs.from_argv(arguments)
    logs.configure(args.frontend.log_format)
    if args.frontend.headless:
        _run_ranks(args)
        return
    with collector_off():
        from stoker_engine.async_llm import AsyncLLM

    client = AsyncLLM(
        args.engine,
        chat_template=args.frontend.chat_template,
        step_timeout=args.frontend.step_timeout,
        log_format=args.frontend.log_format,
    )
    try:
        # Imported while the engine process imports torch.
        with collector_off():
            from stoker_engine.server.http.http_server import bind, serve

        with bind(args.frontend.host, args.frontend.port) as bound:
            serve(args, client, bound)
    finally:
        client.shutdown()


def _run_ranks(args: ServeArgs) -> None:
    """As a node that serves no API."""
    from stoker_engine.processes.node_agent import NodeAgent

    agent = NodeAgent(args.engine, args.frontend.log_format)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, _: agent.stop(signal.Signals(number).name))
    agent.run()
