"""The form in which a chat template expects the content of messages: a string, or a list of parts.

Clients may send either. Most templates expect strings, those of vision models expect parts, and some accept both. If a
template receives the other form, it may write nothing or a Python list literal, without an error. The expected form
cannot be determined from the source, because content may pass through variables, macros and filters. Therefore each
form is rendered with probe texts; a form is accepted if the output contains them as text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from stoker_engine.contract.names import ContentFormat

#: A message's content as one string, as the original parts, or as a single part.
_Form = Literal["string", "parts", "part"]

_FORMS: Final[tuple[_Form, ...]] = ("parts", "string", "part")

_Messages = Sequence[Mapping[str, Any]]

#: Two texts that templates are unlikely to change.
_PROBES: Final = ("stokerprobefirst", "stokerprobelast")

#: Matches a probe written as the value of a key: the template wrote the whole part, not only its text.
_SPELLED_PART: Final = re.compile(rf"""['"]text['"]\s*:\s*['"](?:{"|".join(_PROBES)})""", re.IGNORECASE)

_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": []},
    },
}
_CALL: Final = {"id": "stokerid1", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}


class ContentForms:
    """The forms of content that a template accepts, determined for each role at its first message.

    Args:
        render: renders a chat from its messages and tools; may raise any exception.
    """

    def __init__(self, render: Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str]) -> None:
        self._render = render
        self._writes = functools.cache(self._survives)

    def adapt(self, messages: _Messages, content_format: ContentFormat) -> list[dict[str, Any]]:
        """Return `messages` with their text content in the form of `content_format`.

        Args:
            content_format: ``auto``: a form that the template accepts, if possible the present one.
        """
        return [self._adapted(message, content_format) for message in messages]

    @property
    def writes_users(self) -> bool:
        """Whether the template writes user messages, in any form."""
        return any(self._writes("user", form) for form in _FORMS)

    def _adapted(self, message: Mapping[str, Any], content_format: ContentFormat) -> dict[str, Any]:
        content = message.get("content")
        if not isinstance(content, str) and not _are_texts(content):
            return dict(message)
        return {**message, "content": _in_form(content, self._form(str(message.get("role")), content, content_format))}

    def _form(self, role: str, content: Any, content_format: ContentFormat) -> _Form:
        if content_format != "auto":
            return "string" if content_format == "string" else "parts"
        forms = ("string", "part") if isinstance(content, str) else _FORMS
        return next((form for form in forms if self._writes(role, form)), "string")

    def _survives(self, role: str, form: _Form) -> bool:
        """Whether the template writes the text, not the parts, of a message of `role` with content in that form."""
        probe = {"role": role, "content": _in_form([_text_part(text) for text in _PROBES], form)}
        if role == "tool":
            probe |= {"tool_call_id": _CALL["id"], "name": "look"}
        try:
            text = self._render([*self._before(role), probe, *self._after(role)], [_TOOL] if role == "tool" else None)
        except Exception:  # a template may raise anything: it does not accept such a message
            return False
        lower = text.lower()
        return all(each in lower for each in _PROBES) and not _SPELLED_PART.search(text)

    def _before(self, role: str) -> list[dict[str, Any]]:
        if role in ("user", "system"):
            return []
        calls = [{**self._message("assistant", ""), "tool_calls": [_CALL]}] if role == "tool" else []
        return [self._message("user", "hello"), *calls]

    def _after(self, role: str) -> list[dict[str, Any]]:
        return [] if role in ("user", "tool") else [self._message("user", "hello")]

    def _message(self, role: str, content: str) -> dict[str, Any]:
        return {"role": role, "content": _in_form(content, self._form(role, content, "auto"))}


def _are_texts(content: Any) -> bool:
    return (
        isinstance(content, (list, tuple))
        and bool(content)
        and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content)
    )


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _in_form(content: Any, form: _Form) -> Any:
    if form == "parts":
        return [_text_part(content)] if isinstance(content, str) else content
    text = content if isinstance(content, str) else joined(content)
    return text if form == "string" else [_text_part(text)]


def joined(parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the texts of parts, joined by newlines."""
    return "\n".join(part["text"] for part in parts)
