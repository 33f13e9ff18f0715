"""``stoker chat``: talk to a served model in a terminal. ``--quick`` asks once, for scripts."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker_engine.cli import command_line
from stoker_engine.contract import argv
from stoker_engine.contract.argv import flag
from stoker_engine.contract.errors import StokerError

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True)
class ChatArgs:
    """What ``stoker chat`` takes, with the names of ``vllm chat``."""

    url: str = flag("the server's address, with its /v1", "http://localhost:8000/v1")
    model_name: str | None = flag("which of its models; default: the first", None)
    system_prompt: str | None = flag("what the model reads before the chat", None)
    quick: str | None = flag("ask this, print the answer, and end", None)
    temperature: float | None = flag("sampling temperature; default: the server's", None)
    max_tokens: int | None = flag("most tokens of an answer; default: what fits", None)
    api_key: str | None = flag(
        "the server's API key; better kept in the environment: STOKER_API_KEY, VLLM_API_KEY or OPENAI_API_KEY", None
    )


def main(words: list[str]) -> int:
    """Runs the command; returns its exit code."""
    try:
        return command_line.run("stoker chat", lambda: _main(words))
    except (KeyboardInterrupt, EOFError):
        print()
        return 0


def _main(words: list[str]) -> int:
    parser = argv.Parser(prog="stoker chat", description="Talk to a served model.", allow_abbrev=False)
    argv.add_arguments(parser, ChatArgs, "chat")
    args = argv.from_namespace(ChatArgs, command_line.parse(parser, words))
    import httpx

    key = args.api_key or command_line.api_key()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=args.url.rstrip("/") + "/", headers=headers, timeout=None) as client:
        try:
            return _talk(client, args)
        except httpx.HTTPError as error:
            raise StokerError(f"{args.url} does not answer: {error}") from error


def _talk(client: httpx.Client, args: ChatArgs) -> int:
    model = args.model_name or _models(client)[0]
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    if args.quick is not None:
        _answer(client, args, model, [*messages, {"role": "user", "content": args.quick}])
        return 0
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` a line to edit and a history
    print(f"talking to {model}; Ctrl-D ends, Ctrl-C stops an answer")
    while True:
        messages.append({"role": "user", "content": input("> ")})
        try:
            messages.append({"role": "assistant", "content": _answer(client, args, model, messages)})
        except KeyboardInterrupt:  # what was said so far stands on the screen; the model forgets this turn
            print()
            messages.pop()


def _models(client: httpx.Client) -> list[str]:
    response = client.get("models")
    _check(response)
    return [model["id"] for model in response.json()["data"]]


def _answer(client: httpx.Client, args: ChatArgs, model: str, messages: list[dict[str, Any]]) -> str:
    """Prints the answer as it comes; returns it."""
    body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
    for name in ("temperature", "max_tokens"):
        if getattr(args, name) is not None:
            body[name] = getattr(args, name)
    answer = ""
    with client.stream("POST", "chat/completions", json=body) as response:
        _check(response)
        for event in _events(response):
            if "error" in event:
                raise StokerError(event["error"]["message"])
            for choice in event["choices"]:
                text = choice["delta"].get("content") or ""
                sys.stdout.write(text)
                sys.stdout.flush()
                answer += text
    print()
    return answer


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data != line and data != "[DONE]":
            yield json.loads(data)


def _check(response: httpx.Response) -> None:
    """Raises:
    StokerError: what the server answered, where it is an error.
    """
    if response.is_success:
        return
    response.read()
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    raise StokerError(f"the server answers {response.status_code}: {message}")
