"""Chats → text: the models' Jinja templates, rendered in Jinja's sandbox.

Templates come with models and with requests, and are therefore untrusted code. The sandbox prevents them from reaching
Python's internals and from modifying their arguments. Templates are written for transformers' ``apply_chat_template``,
whose helpers and settings are reimplemented here (``raise_exception``, ``strftime_now``, ``tojson``,
``{% generation %}``, loop controls), because importing transformers takes seconds and imports torch. The tests compare
this module with transformers.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stoker_common.errors import RequestError

logger = logging.getLogger(__name__)

#: Marks the end of the message to be continued; the trailing space shows whether the template trims messages.
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "

#: Maximum length in characters of a template's own error message; longer ones are truncated.
_MAX_ERROR_LENGTH = 1000

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of a chat.

    Args:
        messages: in OpenAI's format: each has ``role`` and usually ``content``.
        tools: JSON schemas of the functions that the model may call.
        documents: documents that the model may cite.
        add_generation_prompt: whether to append the start of the assistant's message.
        continue_final_message: whether to leave the last message open, so that the model continues it.
        variables: further variables of the template.

    Raises:
        RequestError: the template is invalid, raises an error or runs out of memory; there are no messages; or the last
            message cannot be continued.
    """
    if not messages:
        raise RequestError("messages is empty; send at least one message", "messages")
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other; set add_generation_prompt to false",
            "continue_final_message",
        )
    chat = [_message(message) for message in messages]
    final = _leave_open(chat[-1]) if continue_final_message else ""
    known = {
        **(variables or {}),
        "tools": tools,
        "documents": documents,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        try:
            text = _compiled(template).render(**known, messages=chat)
        except MemoryError:
            raise
        except Exception:
            if (with_objects := _with_objects(chat)) == chat:
                raise
            text = _compiled(template).render(**known, messages=with_objects)
    except MemoryError:
        raise RequestError("the chat template exceeds its memory limit; send shorter messages", "messages") from None
    except Exception as error:  # a template may raise anything; only this request fails
        sentence = str(error)[:_MAX_ERROR_LENGTH]
        raise RequestError(f"the chat template failed for these messages: {sentence}", "messages") from error
    return _cut(text, final) if continue_final_message else text


def compile_ahead(template: str) -> bool:
    """Compile a template before the first chat needs it. Return whether it is valid."""
    try:
        _compiled(template)
    except Exception as error:  # a model without a valid template still serves completions
        logger.warning("the chat template is invalid; chat requests will be rejected: %s", error)
        return False
    return True


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates expect it: without nulls, and with both `thinking` and `reasoning_content` if any
    of `_REASONING_FIELDS` is set."""
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[name] for name in _REASONING_FIELDS if name in present), None)
    if reasoning is None:
        return present
    return {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _with_objects(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `chat` for templates that iterate over a call's arguments: string arguments become an object that holds
    the string."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), (list, tuple))
        else message
        for message in chat
    ]


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(text := function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": {"arguments": text}}}


def _leave_open(message: dict[str, Any]) -> str:
    """Mark the end of `message`. Return the text before the mark."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _TAG
        return content
    if isinstance(content, (list, tuple)):
        parts = [dict(part) if isinstance(part, Mapping) else part for part in content]
        message["content"] = parts
        for part in reversed(parts):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                text: str = part["text"]
                part["text"] = text + _TAG
                return text
    raise RequestError("continue_final_message: the last message has no text to continue", "continue_final_message")


def _cut(text: str, final: str) -> str:
    """Return `text` up to the end of the message to be continued."""
    at = text.rfind(_TAG.strip())
    if at < 0 or final.strip() not in text:
        raise RequestError(
            "continue_final_message: the chat template changes the text of the last message, so it cannot be continued",
            "continue_final_message",
        )
    return text[:at] if text[at:].startswith(_TAG) else text[:at].rstrip()


@functools.lru_cache(maxsize=32)  # requests may contain their own templates
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace)
    return environment


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; here its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """``dict(…)`` without access to the class and its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without private names."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # "self" may be one of the names
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"{name!r} is private; a template's namespace allows no private names")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML tags.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
