"""The messages of a conversation, made of parts, whatever API they came by.

An image or a sound would be a further part; as no model here reads any, each API refuses them in its own words.
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
        listed: whether it came in a list of parts. That matters where it is the only one: some templates write a list
            of one in another way than a string.
    """

    text: str
    listed: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The assistant calls a tool.

    Attributes:
        arguments: an object, or text that is none: a call may be cut off.
        id: by which its result names it.
    """

    name: str
    arguments: dict[str, Any] | str | None
    id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates know it."""
        call = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return call if self.id is None else {"id": self.id, **call}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool returned.

    Attributes:
        call_id: of the call that it answers.
    """

    texts: Sequence[Text]
    call_id: str | None = None


Part = Text | Reasoning | ToolCall | ToolResult


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        parts: of the assistant's role alone: `Reasoning` and `ToolCall`; of the role ``tool``: one `ToolResult`.
        name: of the participant, or of the tool.
    """

    role: Role
    parts: Sequence[Part]
    name: str | None = None

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls that it makes."""
        return [part for part in self.parts if isinstance(part, ToolCall)]

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it, its texts in the form in which they came; see
        `tokens.content_format`."""
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


#: The optional fields of a message, in the order in which templates that list them get them.
_OPTIONAL = ("tool_calls", "reasoning", "reasoning_content", "name", "tool_call_id")


def _content(texts: Sequence[Text]) -> str | list[dict[str, str]]:
    """Never null: templates add it to other text."""
    if not texts:
        return ""
    if len(texts) == 1 and not texts[0].listed:
        return texts[0].text
    return [{"type": "text", "text": each.text} for each in texts]
