"""``stoker chat``: chat with a served model in a terminal. ``--quick`` asks one question, for scripts.

Without a terminal the lines of the input are the questions, only answers are printed, and the first error ends the
chat.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from stoker_common.errors import StokerError
from stoker_engine.cli import command_line
from stoker_engine.cli.chat_answer import ChatAnswer, RequestRefusedError, check, print_piece, stream
from stoker_engine.cli.server_url import api_url
from stoker_engine.contract import argv
from stoker_engine.contract.argv import flag

if TYPE_CHECKING:
    import httpx

    from stoker_engine.cli.chat_tools import Tools

#: Maximum rounds of tool calls for one question; some models never stop calling tools.
MAX_ROUNDS: Final = 16


@dataclass(frozen=True)
class ChatArgs:
    """Arguments of ``stoker chat``, with the names of ``vllm chat``."""

    url: str = flag("base URL of the server's API; /v1 is added to a URL without a path", "http://localhost:8000/v1")
    model_name: str | None = flag("name of the model; default: the server's first", None)
    system_prompt: str | None = flag("system message before the chat", None)
    quick: str | None = flag("ask this question, print the answer, and exit", None)
    tools: str | None = flag(
        "Python file with functions that the model may call, except those with a leading underscore; they run on this "
        "machine, with your permissions, and with arguments that the model chooses",
        None,
    )
    temperature: float | None = flag("sampling temperature; default: the server's", None)
    stop: tuple[str, ...] = flag(
        r"texts that end an answer and are left out of it; \n is a line break, so --stop '\nUser:' keeps a base model "
        "from writing your next question",
        (),
        repeatable=True,
    )
    max_tokens: int = flag("maximum tokens of an answer; 0: only the model's context limits it", 1024)
    api_key: str | None = flag(
        "the server's API key; preferably in the environment: STOKER_API_KEY, VLLM_API_KEY or OPENAI_API_KEY", None
    )


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    return command_line.run("stoker chat", lambda: _until_left(arguments))


def _until_left(arguments: list[str]) -> int:
    try:
        return _main(arguments)
    except (KeyboardInterrupt, EOFError):
        if _in_terminal():
            print()
        return 0


def _in_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _main(arguments: list[str]) -> int:
    parser = argv.Parser(prog="stoker chat", description="Chat with a served model.", allow_abbrev=False)
    argv.add_arguments(parser, ChatArgs, "chat")
    args = argv.from_namespace(ChatArgs, command_line.parse(parser, arguments))
    import httpx

    tools = None
    if args.tools is not None:
        from stoker_engine.cli.chat_tools import Tools

        tools = Tools.of_file(args.tools)
    url = api_url("--url", args.url)
    key = args.api_key or command_line.api_key()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=f"{url}/", headers=headers, timeout=None) as client:
        try:
            return _Conversation(client, args, args.model_name or _models(client)[0], tools).run()
        except httpx.HTTPError as error:
            raise StokerError(f"{url} does not answer: {error}") from error


def _models(client: httpx.Client) -> list[str]:
    response = client.get("models")
    check(response)
    return [model["id"] for model in response.json()["data"]]


@dataclass
class _Conversation:
    """A chat with one model."""

    client: httpx.Client
    args: ChatArgs
    model: str
    tools: Tools | None

    def run(self) -> int:
        """Chat until `EOFError`, or ask only the question of ``--quick``; return the exit code.

        Raises:
            StokerError: an answer failed, with ``--quick`` or without a terminal.
        """
        messages: list[dict[str, Any]] = []
        if self.args.system_prompt:
            messages.append({"role": "system", "content": self.args.system_prompt})
        if self.args.quick is not None:
            self._ask(messages, self.args.quick)
            return 0
        in_terminal = _in_terminal()
        if in_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives `input` line editing and a history
            print(f"chatting with {self.model}; Ctrl-D exits, Ctrl-C stops an answer")
        while True:
            question = input("> " if in_terminal else "")
            before = len(messages)
            try:
                self._ask(messages, question)
            except KeyboardInterrupt:  # the partial answer stays on the screen, but not in the conversation
                print_piece("\n")
                del messages[before:]
            except StokerError as error:
                if not in_terminal:
                    raise
                print(f"stoker chat: {error}", file=sys.stderr)
                del messages[before:]

    def _ask(self, messages: list[dict[str, Any]], question: str) -> None:
        """Print the answers to `question`, run tool calls, and add the question, answers and tool results to
        `messages`.

        Raises:
            StokerError: the server returns an error, or the model exceeds `MAX_ROUNDS` of tool calls.
        """
        messages.append({"role": "user", "content": question})
        for _ in range(MAX_ROUNDS):
            answer = self._answer(messages)
            messages.append(answer.message())
            if not answer.calls or self.tools is None:
                return
            messages += [self.tools.answer(call) for call in answer.calls]
        raise StokerError(f"the model called tools in {MAX_ROUNDS} rounds without answering")

    def _answer(self, messages: list[dict[str, Any]]) -> ChatAnswer:
        body: dict[str, Any] = {"model": self.model, "messages": messages, "stream": True}
        if self.args.temperature is not None:
            body["temperature"] = self.args.temperature
        if self.args.stop:
            body["stop"] = [text.replace("\\n", "\n") for text in self.args.stop]
        if self.tools is not None:
            body["tools"] = self.tools.definitions
        answer = self._limited(body) if self.args.max_tokens else stream(self.client, body)
        if answer.finish_reason == "length":
            print("stoker chat: the answer is cut off; --max-tokens sets its maximum length", file=sys.stderr)
        return answer

    def _limited(self, body: dict[str, Any]) -> ChatAnswer:
        """Stream an answer of at most ``--max-tokens``.

        A server refuses a limit that exceeds the rest of the model's context; then the request is repeated without a
        limit.
        """
        try:
            return stream(self.client, {**body, "max_tokens": self.args.max_tokens})
        except RequestRefusedError as error:
            if "context length" not in str(error):
                raise
        return stream(self.client, body)
