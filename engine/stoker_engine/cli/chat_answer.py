"""A streamed answer of /v1/chat/completions: printed as it arrives, and collected.

If the output is not a terminal, only the answer is printed, without reasoning and calls.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from stoker_common.errors import StokerError
from stoker_engine.cli.lines import lines_of

if TYPE_CHECKING:
    import httpx

_DIM: Final = "\x1b[2m"
_PLAIN: Final = "\x1b[0m"


class RequestRefusedError(StokerError):
    """The server refused a request as invalid, with status 400."""


@dataclass
class ChatAnswer:
    """The assistant's answer.

    Attributes:
        calls: tool calls, in the API's format.
        finish_reason: why the answer ended, as the API reports it; "length": at a limit of its length; None: not
            reported.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def message(self) -> dict[str, Any]:
        """Return the answer as a message of the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:  # models expect the reasoning that preceded their tool calls
            message["tool_calls"] = self.calls
            if self.reasoning:
                message["reasoning"] = self.reasoning
        return message

    def add(self, delta: dict[str, Any]) -> None:
        """Add the delta of an event."""
        self.content += delta.get("content") or ""
        self.reasoning += delta.get("reasoning") or ""
        for piece in delta.get("tool_calls") or ():
            if piece["index"] == len(self.calls):
                self.calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
            call = self.calls[piece["index"]]
            call["id"] += piece.get("id") or ""
            for name, text in (piece.get("function") or {}).items():
                call["function"][name] += text or ""


def stream(client: httpx.Client, body: dict[str, Any]) -> ChatAnswer:
    """Send a request, print the answer as it arrives, and return it.

    Raises:
        RequestRefusedError: the server answered with status 400.
        StokerError: the server returned another error.
    """
    answer = ChatAnswer()
    with client.stream("POST", "chat/completions", json=body) as response:
        check(response)
        for event in _events(response):
            if "error" in event:
                raise StokerError(event["error"]["message"])
            for choice in event["choices"]:
                delta = choice["delta"]
                if thought := delta.get("reasoning"):
                    print_dimmed(thought)
                if text := delta.get("content"):
                    if answer.reasoning and not answer.content:
                        print_dimmed("\n")
                    print_piece(text)
                answer.add(delta)
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    if answer.content or not answer.calls:
        print_piece("\n")
    elif answer.reasoning:
        print_dimmed("\n")
    return answer


def print_piece(text: str) -> None:
    """Print a piece of the answer."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_dimmed(text: str) -> None:
    """Print text other than the answer if the output is a terminal, dimmed unless NO_COLOR is set."""
    if sys.stdout.isatty():
        print_piece(text if os.environ.get("NO_COLOR") else f"{_DIM}{text}{_PLAIN}")


def check(response: httpx.Response) -> None:
    """Check the status of a response.

    Raises:
        RequestRefusedError: the server answered with status 400.
        StokerError: the server returned another error.
    """
    if response.is_success:
        return
    response.read()
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    text = f"the server returned {response.status_code}: {message}"
    if response.status_code == 400:
        raise RequestRefusedError(text)
    if response.status_code == 404 and "/v1/" not in response.url.path:
        text += f" ({response.url}; the base URL of an API usually ends with /v1)"
    raise StokerError(text)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in lines_of(response.iter_bytes()):
        data = line.removeprefix("data: ")
        if data != line and data != "[DONE]":
            yield json.loads(data)
