"""``stoker run-batch -i FILE -o FILE --model M``: answer an OpenAI batch file offline.

Each input line is a request, which the server's application answers in this process, without a network. For each
request one output line, with the response or an error, is written as soon as the request is done. So output lines are
in the order of completion; ``custom_id`` identifies the request of a line, and a file with duplicate ids is
refused.
Format: platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from stoker_common.errors import ArgumentError, StokerError
from stoker_engine import logs
from stoker_engine.cli import command_line
from stoker_engine.contract import argv
from stoker_engine.contract.argv import flag
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.contract.names import CONTENT_FORMATS, ContentFormat
from stoker_engine.contract.serve_args import ServeArgs

_ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")

#: Requests in flight for each sequence that a step can hold (``--max-num-seqs``), so that the next requests are always
#: ready.
_AHEAD = 2

_BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True)
class BatchArgs:
    """Arguments of ``stoker run-batch`` in addition to the engine's."""

    input_file: str = flag("batch file with a request per line; - means standard input", "")
    output_file: str = flag("output file with an answer per line; - means standard output", "")
    chat_template: str | None = flag("Jinja chat template: a file, or the template itself", None)
    chat_template_content_format: ContentFormat = flag(
        "form in which the chat template gets message contents: string, or lists of parts (openai); auto: as sent, if "
        "the template renders it, otherwise converted to the other form",
        "auto",
        choices=CONTENT_FORMATS,
    )
    lora_modules: tuple[str, ...] = flag(
        "adapters that requests may name as their model, each as NAME=PATH or as vLLM's JSON; requires --enable-lora",
        (),
        repeatable=True,
    )
    enable_log_requests: bool = flag("log each request's prompt and parameters", False)
    disable_tqdm: bool = flag("show no progress bar", False)

    def __post_init__(self) -> None:
        for name in ("input_file", "output_file"):
            if not getattr(self, name):
                raise ArgumentError(argv.flag_name(name), "is required: a file name, or -")


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code (1: a line failed, or the batch was not completed; 2: invalid arguments or
    model)."""
    return command_line.run("stoker run-batch", lambda: _main(arguments))


def _main(arguments: list[str]) -> int:
    parser = argv.Parser(
        prog="stoker run-batch",
        description="Answer an OpenAI batch file without a server. --model M is the same as MODEL, -i as --input-file, "
        "-o as --output-file.",
        allow_abbrev=False,
    )
    argv.add_arguments(parser, BatchArgs, "batch")
    argv.add_arguments(parser, EngineArgs, "engine")
    spelled = command_line.with_model_flag(command_line.with_short_flags(arguments, {"-i": "input", "-o": "output"}))
    namespace = command_line.parse(parser, spelled)
    batch = argv.from_namespace(BatchArgs, namespace)
    args = ServeArgs(
        argv.from_namespace(EngineArgs, namespace).offline(),
        FrontendArgs(
            chat_template=batch.chat_template,
            chat_template_content_format=batch.chat_template_content_format,
            enable_log_requests=batch.enable_log_requests,
            disable_log_stats=True,
            lora_modules=batch.lora_modules,
        ),
    )
    logs.configure("text")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # the application already logs each request
    with contextlib.ExitStack() as files:
        try:
            source = sys.stdin if batch.input_file == "-" else files.enter_context(_open(batch.input_file, "r"))
            if source is sys.stdin or not source.seekable():
                source = files.enter_context(_spooled(source))
            _refuse_doubled(source, "standard input" if batch.input_file == "-" else batch.input_file)
        except OSError as error:
            raise ArgumentError("--input-file", f"cannot read {batch.input_file}: {error.strerror}") from error
        try:
            sink = sys.stdout if batch.output_file == "-" else files.enter_context(_open(batch.output_file, "w"))
        except OSError as error:
            raise ArgumentError("--output-file", f"cannot write {batch.output_file}: {error.strerror}") from error
        return asyncio.run(_run(args, source, sink, show=not batch.disable_tqdm))


def _open(name: str, mode: str) -> IO[str]:
    # Invalid UTF-8 is replaced, so that such a line gets an answer or an error like other lines.
    return Path(name).open(mode, encoding="utf-8", errors="replace", newline="\n")


def _spooled(stream: IO[str]) -> IO[str]:
    """Copy a stream to a temporary file, which can be read twice."""
    spool = tempfile.TemporaryFile("w+", encoding="utf-8", errors="surrogateescape", newline="\n")  # noqa: SIM115 - the caller's
    shutil.copyfileobj(stream, spool)
    spool.seek(0)
    return spool


def _refuse_doubled(source: IO[str], name: str) -> None:
    """Check that no two lines have the same ``custom_id``, which identifies answers, and rewind the file.

    Raises:
        ArgumentError: an id is duplicated.
    """
    first_lines: dict[str, int] = {}
    doubled: dict[str, list[int]] = {}
    for line_number, line in enumerate(source, 1):
        with contextlib.suppress(ValueError, RecursionError, AttributeError):  # the line's output reports the error
            custom_id = _parsed(line).get("custom_id")
            if isinstance(custom_id, str) and (first := first_lines.setdefault(custom_id, line_number)) != line_number:
                doubled.setdefault(custom_id, [first]).append(line_number)
    if doubled:
        custom_id, line_numbers = next(iter(doubled.items()))
        lines = ", ".join(map(str, line_numbers[:10])) + (" and more" if len(line_numbers) > 10 else "")
        further_ids = f"; {len(doubled) - 1} other ids are duplicated, too" if len(doubled) > 1 else ""
        raise ArgumentError(
            "--input-file", f"{name}: custom_id {custom_id[:100]!r} is on lines {lines}{further_ids}; use unique ids"
        )
    source.seek(0)


async def _run(args: ServeArgs, source: IO[str], sink: IO[str], show: bool) -> int:
    from tqdm import tqdm

    from stoker_engine.async_llm import AsyncLLM

    client = AsyncLLM(args.engine, chat_template=args.frontend.chat_template, step_timeout=args.frontend.step_timeout)
    try:
        from stoker_engine.server.app import create_app
        from stoker_engine.server.conversation.service import Service

        service = Service(args, client)
        app = create_app(service)
        info = await client.load()
        service.on_loaded(info)
        await service.load_modules()
        failed = 0
        capacity = asyncio.Semaphore(_AHEAD * info.max_num_seqs * args.engine.data_parallel_size)
        with tqdm(desc="Answered", unit=" lines", disable=not show) as bar:

            async def answer(line: str) -> None:
                nonlocal failed
                try:
                    result = await answered(app, line)
                finally:
                    capacity.release()
                failed += result["error"] is not None or result["response"]["status_code"] != 200
                sink.write(json.dumps(result) + "\n")
                sink.flush()
                bar.update()

            try:
                async with asyncio.TaskGroup() as tasks:
                    for line in _lines(source):
                        await capacity.acquire()
                        tasks.create_task(answer(line))
            except ExceptionGroup as group:
                if (failures := group.subgroup(OSError)) is None:
                    raise
                with contextlib.suppress(OSError):  # discards the unwritten rest, which cannot be written later either
                    sink.close()
                raise StokerError(f"cannot write {sink.name}: {failures.exceptions[0]}") from group
        if failed:
            print(f"stoker run-batch: {failed} lines failed; see their output lines", file=sys.stderr)
        return 1 if failed else 0
    finally:
        client.shutdown()


def _lines(source: IO[str]) -> Iterator[str]:
    return (line for line in source if line.removeprefix(_BYTE_ORDER_MARK).strip())


def _parsed(line: str) -> Any:
    """Return the JSON of a line; the first line may begin with a byte-order mark."""
    return json.loads(line.removeprefix(_BYTE_ORDER_MARK))


async def answered(app: Any, line: str) -> dict[str, Any]:
    """Return the output line for an input line. Never raises: errors are part of the line."""
    import httpx

    result: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": None, "response": None, "error": None}
    try:
        request = _parsed(line)
        if not isinstance(request, dict):
            raise ValueError("the line is not a JSON object")
        result["custom_id"] = request.get("custom_id")
        _check(request)
    except (ValueError, RecursionError) as error:
        result["error"] = {"code": "invalid_line", "message": str(error)}
        return result
    try:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:
            response = await client.post(request["url"], json=request["body"], headers=_key())
        request_id = response.headers.get("x-request-id", "")
        result["response"] = {"status_code": response.status_code, "request_id": request_id, "body": response.json()}
    except Exception as error:  # an error affects only its own line
        result["error"] = {"code": "internal_error", "message": f"{type(error).__name__}: {error}"}
    return result


def _check(request: dict[str, Any]) -> None:
    if not isinstance(request.get("custom_id"), str):
        raise ValueError("custom_id is missing, or not a string")
    if request.get("method") != "POST":
        raise ValueError(f"method must be POST, got {request.get('method')!r}")
    if request.get("url") not in _ENDPOINTS:
        raise ValueError(f"url must be one of {', '.join(_ENDPOINTS)}, got {request.get('url')!r}")
    body = request.get("body")
    if not isinstance(body, dict):
        raise ValueError("body is missing, or not an object")
    if body.get("stream"):
        raise ValueError("streaming is not possible in a batch; omit stream")


def _key() -> dict[str, str]:
    """Return the header with the environment's API key, which the application in this process may require."""
    key = command_line.api_key()
    return {"authorization": f"Bearer {key}"} if key else {}
