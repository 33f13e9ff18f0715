"""``stoker chat``: talk to a served model in a terminal. ``--quick`` asks once, for scripts."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from stoker_common.errors import StokerError
from stoker_engine.cli import command_line
from stoker_engine.cli.chat_answer import ChatAnswer, check, print_piece, stream
from stoker_engine.contract import argv
from stoker_engine.contract.argv import flag

if TYPE_CHECKING:
    import httpx

    from stoker_engine.cli.chat_tools import Tools

#: How often a model may call tools before it answers; some never stop.
MAX_ROUNDS: Final = 16


@dataclass(frozen=True)
class ChatArgs:
    """What ``stoker chat`` takes, with the names of ``vllm chat``."""

    url: str = flag("the server's address, with its /v1", "http://localhost:8000/v1")
    model_name: str | None = flag("which of its models; default: the first", None)
    system_prompt: str | None = flag("what the model reads before the chat", None)
    quick: str | None = flag("ask this, print the answer, and end", None)
    tools: str | None = flag(
        "a Python file whose functions the model may call, but for those with a leading underscore; they run here, "
        "with your rights, on what the model writes",
        None,
    )
    temperature: float | None = flag("sampling temperature; default: the server's", None)
    max_tokens: int | None = flag("most tokens of an answer; default: what fits", None)
    api_key: str | None = flag(
        "the server's API key; better kept in the environment: STOKER_API_KEY, VLLM_API_KEY or OPENAI_API_KEY", None
    )


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    return command_line.run("stoker chat", lambda: _until_left(arguments))


def _until_left(arguments: list[str]) -> int:
    try:
        return _main(arguments)
    except (KeyboardInterrupt, EOFError):
        print()
        return 0


def _main(arguments: list[str]) -> int:
    parser = argv.Parser(prog="stoker chat", description="Talk to a served model.", allow_abbrev=False)
    argv.add_arguments(parser, ChatArgs, "chat")
    args = argv.from_namespace(ChatArgs, command_line.parse(parser, arguments))
    import httpx

    tools = None
    if args.tools is not None:
        from stoker_engine.cli.chat_tools import Tools

        tools = Tools.of_file(args.tools)
    key = args.api_key or command_line.api_key()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=args.url.rstrip("/") + "/", headers=headers, timeout=None) as client:
        try:
            return _Conversation(client, args, args.model_name or _models(client)[0], tools).run()
        except httpx.HTTPError as error:
            raise StokerError(f"{args.url} does not answer: {error}") from error


def _models(client: httpx.Client) -> list[str]:
    response = client.get("models")
    check(response)
    return [model["id"] for model in response.json()["data"]]


@dataclass
class _Conversation:
    """One conversation."""

    client: httpx.Client
    args: ChatArgs
    model: str
    tools: Tools | None

    def run(self) -> int:
        """Asks what is to be asked; returns the exit code."""
        messages: list[dict[str, Any]] = []
        if self.args.system_prompt:
            messages.append({"role": "system", "content": self.args.system_prompt})
        if self.args.quick is not None:
            self._ask(messages, self.args.quick)
            return 0
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives `input` a line to edit and a history
        print(f"talking to {self.model}; Ctrl-D ends, Ctrl-C stops an answer")
        while True:
            question = input("> ")
            before = len(messages)
            try:
                self._ask(messages, question)
            except KeyboardInterrupt:  # what was said so far stands on the screen; the model forgets this turn
                print_piece("\n")
                del messages[before:]
            except StokerError as error:
                print(f"stoker chat: {error}", file=sys.stderr)
                del messages[before:]

    def _ask(self, messages: list[dict[str, Any]], question: str) -> None:
        """Prints the answer to `question`, after all calls of tools that it takes, and adds all to `messages`.

        Raises:
            StokerError: the server refuses, or the model does not stop to call tools.
        """
        messages.append({"role": "user", "content": question})
        for _ in range(MAX_ROUNDS):
            answer = self._answer(messages)
            messages.append(answer.message())
            if not answer.calls or self.tools is None:
                return
            messages += [self.tools.answer(call) for call in answer.calls]
        raise StokerError(f"the model called tools {MAX_ROUNDS} times and did not answer")

    def _answer(self, messages: list[dict[str, Any]]) -> ChatAnswer:
        body: dict[str, Any] = {"model": self.model, "messages": messages, "stream": True}
        for name in ("temperature", "max_tokens"):
            if getattr(self.args, name) is not None:
                body[name] = getattr(self.args, name)
        if self.tools is not None:
            body["tools"] = self.tools.definitions
        return stream(self.client, body)
