"""API-independent messages of a conversation, made of parts.

No supported model reads images or audio, so each API refuses them with its own error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stoker_engine.server.parsers.parts import Reasoning

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text.

    Attributes:
        listed: whether it came in a list of parts. This matters for a single part: some templates render a list of one
            differently from a string.
    """

    text: str
    listed: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the assistant.

    Attributes:
        arguments: an object, or text that is no JSON object, as in an incomplete call; None: no arguments.
        id: id that the tool result refers to.
    """

    name: str
    arguments: dict[str, Any] | str | None
    id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the call in the form that chat templates expect."""
        call = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return call if self.id is None else {"id": self.id, **call}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a tool.

    Attributes:
        call_id: id of the call that it answers; None if the client sent none.
    """

    texts: Sequence[Text]
    call_id: str | None = None


Part = Text | Reasoning | ToolCall | ToolResult


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation.

    Attributes:
        parts: `Reasoning` and `ToolCall` only for the role ``assistant``; one `ToolResult` for the role ``tool``.
        name: name of the participant or the tool.
    """

    role: Role
    parts: Sequence[Part]
    name: str | None = None

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls of the message."""
        return [part for part in self.parts if isinstance(part, ToolCall)]

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form that chat templates expect.

        The content is a string if there is no text, or one that came outside a list; otherwise it is a list. See
        `tokens.content_format`.
        """
        texts = [part for part in self.parts if isinstance(part, Text)]
        optional: dict[str, Any] = {}
        if calls := self.tool_calls:
            optional["tool_calls"] = [call.for_template() for call in calls]
        for part in self.parts:
            match part:
                case Reasoning(text):
                    optional |= {"reasoning": text, "reasoning_content": text}  # templates use either name
                case ToolResult():
                    texts += part.texts
                    optional["tool_call_id"] = part.call_id
        content = _content(texts)
        optional["name"] = self.name
        return {"role": self.role, "content": content} | {
            key: optional[key] for key in _OPTIONAL if optional.get(key) is not None
        }


#: Optional fields of a message, in the order in which templates that iterate over them see them.
_OPTIONAL = ("tool_calls", "reasoning", "reasoning_content", "name", "tool_call_id")


def _content(texts: Sequence[Text]) -> str | list[dict[str, str]]:
    """Return the content; never None, because templates concatenate it."""
    if not texts:
        return ""
    if len(texts) == 1 and not texts[0].listed:
        return texts[0].text
    return [{"type": "text", "text": each.text} for each in texts]
