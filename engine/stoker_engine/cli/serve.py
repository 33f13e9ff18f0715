"""``stoker serve MODEL``: serve a model over HTTP. The server answers probes immediately, while the engine loads.

With ``--headless`` the command serves no API: it runs ranks for the server on node 0.

If the command ends because it cannot serve, it writes a termination message (`contract.termination_message`).
"""

from __future__ import annotations

import os
import signal
import socket

from stoker_common.errors import StokerError
from stoker_engine import logs
from stoker_engine.cli import command_line, open_files, termination_log
from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.contract.serve_args import ServeArgs
from stoker_engine.contract.termination_message import Reason, TerminationMessage
from stoker_engine.imports import collector_off
from stoker_engine.models.check_model import check_local_model
from stoker_engine.server.http.bind import bind
from stoker_engine.server.http.tls import check_tls


def main(argv: list[str]) -> int:
    """Run the command; return its exit code (2: invalid argument or MODEL, 1: it cannot serve, 0: asked to stop)."""
    # As PID 1 of a container, a process without a SIGTERM handler cannot be stopped before it serves. Exiting at once
    # is safe: no client is served yet, and the engine's process ends with this one. An exception could be swallowed by
    # imported modules.
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
    open_files.raise_limit()
    with bind(args.frontend.host, args.frontend.port) as bound:
        check_tls(args.frontend)
        _check_files(args.frontend)
        check_local_model(args.engine)
        if args.frontend.api_server_count > 1:
            _serve_by_front_ends(args, bound)
        else:
            _serve_alone(args, bound)


def _check_files(args: FrontendArgs) -> None:
    """Check that the files of API keys and of the chat template can be read. Imports take time, so only what is needed
    is imported."""
    if args.chat_template is not None:
        from stoker_engine.tokens.tokenizer import read_chat_template

        read_chat_template(args.chat_template)
    if args.api_key_file is not None or args.admin_api_key_file is not None:
        from stoker_engine.server.middleware.admin_keys import admin_keys
        from stoker_engine.server.middleware.api_keys import APIKeys

        APIKeys.from_args(args)
        admin_keys(args)


def _serve_alone(args: ServeArgs, bound: socket.socket) -> None:
    """Serve with this process as the only front end."""
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
            from stoker_engine.server.http.http_server import serve

        serve(args, client, bound)
    finally:
        client.shutdown()


def _serve_by_front_ends(args: ServeArgs, bound: socket.socket) -> None:
    """Serve with several front ends, which this process supervises."""
    with collector_off():
        from stoker_engine.server.front_ends.supervisor import supervise

    supervise(args, bound)


def _run_ranks(args: ServeArgs) -> None:
    """Run the ranks of a node that serves no API."""
    from stoker_engine.processes.node_agent import NodeAgent

    agent = NodeAgent(args.engine, args.frontend.log_format)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, _: agent.stop(signal.Signals(number).name))
    agent.run()
