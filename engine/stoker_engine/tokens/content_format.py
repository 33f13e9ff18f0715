"""How a chat template takes the content of messages: as a string, or as a list of parts.

Clients may send either. Most templates write strings, those of models that also see write parts, some write both. A
template that is given the form it does not expect writes nothing, or Python's spelling of a list, without an error.
Which form it expects cannot be read off its source, where content may go through variables, macros and filters. So
each form is rendered with a probe, and the text that survives decides.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from stoker_engine.contract.names import ContentFormat

#: A message's content as one string, as the parts that it was given in, as a single part.
_Form = Literal["string", "parts", "part"]

_FORMS: Final[tuple[_Form, ...]] = ("parts", "string", "part")

_Messages = Sequence[Mapping[str, Any]]

#: Two texts that a template has no reason to change.
_PROBES: Final = ("stokerprobefirst", "stokerprobelast")

#: A text that is written as the value of a key is written with the part around it.
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
    """In which forms a template writes content, found for a role when its first message comes.

    Args:
        render: writes a chat, given its messages and its tools; may raise anything.
    """

    def __init__(self, render: Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str]) -> None:
        self._render = render
        self._writes = functools.cache(self._survives)

    def adapt(self, messages: _Messages, content_format: ContentFormat) -> list[dict[str, Any]]:
        """`messages`, their content in a form that the template writes; as it is, where it writes that.

        Args:
            content_format: ``auto``, or the form of all content.
        """
        return [self._adapted(message, content_format) for message in messages]

    @property
    def writes_users(self) -> bool:
        """Whether what a user says is written, in any form."""
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
        """Whether the template writes all text of a message of `role`, whose content has that form, and only it."""
        probe = {"role": role, "content": _in_form([_text_part(text) for text in _PROBES], form)}
        if role == "tool":
            probe |= {"tool_call_id": _CALL["id"], "name": "look"}
        try:
            text = self._render([*self._before(role), probe, *self._after(role)], [_TOOL] if role == "tool" else None)
        except Exception:  # whatever a template raises: it takes no such message
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
    """The text of parts as one string."""
    return "\n".join(part["text"] for part in parts)
