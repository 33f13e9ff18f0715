"""``stoker serve MODEL``: the engine behind HTTP, as one process."""

from __future__ import annotations

import logging
import signal
import sys

from stoker_engine.contract.engine_args import ServeArgs
from stoker_engine.contract.errors import ArgumentError, ModelError, StokerError


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code (2: a wrong argument or MODEL, 1: it cannot serve, 0: told to stop)."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # As PID 1 of a container a process that does not handle SIGTERM cannot be stopped while it loads.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _serve(ServeArgs.from_argv(argv))
    except ArgumentError as error:
        print(f"stoker serve: {error}\nTry 'stoker serve --help'.", file=sys.stderr)
        return 2
    except ModelError as error:
        print(f"stoker serve: {error}", file=sys.stderr)
        return 2
    except StokerError as error:
        print(f"stoker serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _serve(args: ServeArgs) -> int:
    # Imports wait for what needs them: torch takes seconds, a wrong flag or a taken port is told at once.
    from stoker_engine.server.http_server import bind, serve

    names = args.engine.served_model_name or (args.engine.model.removeprefix("demo://"),)
    with bind(args.frontend.host, args.frontend.port) as bound:
        from stoker_engine.async_llm import AsyncLLM
        from stoker_engine.metrics import EngineMetrics
        from stoker_engine.server.app import create_app
        from stoker_engine.server.service import Service

        llm = AsyncLLM.from_args(args.engine, args.frontend.chat_template)
        metrics = EngineMetrics(names[0], args.engine, llm.max_model_len, llm.engine.runner.num_blocks)
        llm.engine.observer = metrics
        llm.start()
        try:
            service = Service(llm, names, args.engine.model, metrics.registry)
            return serve(create_app(service), llm, bound, names[0], args.frontend.uvicorn_log_level)
        finally:
            llm.shutdown()
