"""Parsing of request bodies: the model, and a canonical text of the prompt for prefix matching.

The text is not the prompt that the model reads, because only the server applies the chat template. It is cheap to
compute, and the text of a continued conversation normally begins with that of the earlier request. Tools and
instructions come first, as in templates. Cache-control hints of tools and content parts are left out, because clients
move them, and they are no part of the prompt.

Bodies are untrusted: the code does not recurse and takes linear time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import orjson

from stoker_common.block_hash import CacheKeys
from stoker_common.errors import RequestError
from stoker_common.text_prefix_hash import text_chain
from stoker_gateway.ext_proc.errors import TooLargeError
from stoker_gateway.ext_proc.forms import text_fields
from stoker_gateway.ext_proc.token_estimate import (
    DEFAULT_OUTPUT_TOKENS,
    MAX_MEDIUM_TOKENS,
    TOKEN_BYTES,
    max_output_tokens,
    prompt_tokens,
)
from stoker_gateway.protocol.paths import FORMS, GENERATING

#: Body fields that identify a session if no header does, in order of preference.
_SESSION_FIELDS: Final = ("prompt_cache_key", "user")
#: Start of the text part with Claude Code's billing header, which differs in each request. Stoker's engine drops it.
_BILLING: Final = "x-anthropic-billing-header:"
#: Maximum number of messages, items and their parts in one body: more than fit into any model's context.
MAX_ITEMS: Final = 262_144
#: Fields of a conversation item, besides its role and content, that belong to the prompt.
_CALLS: Final = ("name", "arguments", "output", "tool_calls")


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request for a model.

    Attributes:
        model: served name.
        chain: hashes of the full blocks of the prompt's text; empty if the path is not in `GENERATING`, or if the
            request continues a stored response, since only the server that stores it knows the start of the prompt.
        size: size of the prompt's text in bytes; 0 if the path is not in `GENERATING`.
        session: session id in the body, if any.
        previous_response_id: id of the stored response that the request continues, if any.
        request_id: id of the response, if the client chooses it in the body.
        prompt_tokens: estimated number of prompt tokens.
        max_output_tokens: maximum number of tokens of all outputs together.
        has_max_output_tokens: False if `max_output_tokens` is a default.
    """

    model: str
    chain: Sequence[bytes] = ()
    size: int = 0
    session: str | None = None
    previous_response_id: str | None = None
    request_id: str | None = None
    prompt_tokens: int = 0
    max_output_tokens: int = 0
    has_max_output_tokens: bool = True


def read_request(path: str, body: bytes, content_type: str = "") -> ModelRequest:
    """Parse the body of a request to `path`.

    Raises:
        RequestError: the body is malformed or too large, or names no model.
    """
    if path in FORMS:
        return _read_form(body, content_type)
    fields = _fields(body)
    model, previous = _model(fields), _string(fields, "previous_response_id")
    generates = path in GENERATING
    text = prompt_text(fields) if generates else b""
    max_tokens, is_set = max_output_tokens(fields, path) if generates else (0, True)
    return ModelRequest(
        model=model,
        chain=text_chain(text, model, CacheKeys(_string(fields, "cache_salt") or "")) if previous is None else (),
        size=len(text),
        session=_session(fields),
        previous_response_id=previous,
        request_id=_string(fields, "request_id"),
        prompt_tokens=prompt_tokens(fields, path, len(text) if generates else len(body)),
        max_output_tokens=max_tokens,
        has_max_output_tokens=is_set,
    )


def _read_form(body: bytes, content_type: str) -> ModelRequest:
    return ModelRequest(
        model=_model(dict(text_fields(body, content_type))),
        prompt_tokens=min(MAX_MEDIUM_TOKENS, max(1, len(body) // TOKEN_BYTES)),
        max_output_tokens=DEFAULT_OUTPUT_TOKENS,
        has_max_output_tokens=False,
    )


def prompt_text(fields: dict[str, Any]) -> bytes:
    """Return the canonical text of a body's prompt, for all supported APIs."""
    if fields.get("prompt") is not None:
        return _completion(fields["prompt"])
    pieces: list[str] = []
    if tools := fields.get("tools"):
        pieces.append(_dump([_without_hint(each) for each in tools] if isinstance(tools, list) else tools))
    for name in ("system", "instructions"):
        if fields.get(name):
            pieces.append("\x1esystem\x1f")
            _add_content(fields[name], pieces)
    _check_number(fields)
    for name in ("messages", "input"):
        items = fields.get(name)
        if isinstance(items, str):
            pieces += ("\x1euser\x1f", items)
        elif isinstance(items, list):
            for item in items:
                _add_item(item, pieces)
    return "".join(pieces).encode()


def _check_number(fields: dict[str, Any]) -> None:
    """Reject bodies with too many items to process quickly."""
    number = 0
    for name in ("messages", "input"):
        items = fields.get(name)
        for part in chain((items,), _contents(items)) if isinstance(items, list) else ():
            number += len(part)
            if number > MAX_ITEMS:
                raise TooLargeError(
                    f"the request body has more than {MAX_ITEMS} messages, items and parts; send fewer, longer ones",
                    name,
                )
    for name in ("system", "instructions"):
        parts = fields.get(name)
        if isinstance(parts, list) and len(parts) > MAX_ITEMS:
            raise TooLargeError(f"{name}: has more than {MAX_ITEMS} parts; send fewer, longer ones", name)


def _contents(items: list[Any]) -> Iterator[list[Any]]:
    """Yield the items' contents that are lists."""
    for item in items:
        if isinstance(item, dict) and isinstance(content := item.get("content"), list):
            yield content


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body) if body else None
    except ValueError as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError("the request body must be a JSON object, sent as Content-Type: application/json")
    return fields


def _model(fields: dict[str, Any]) -> str:
    model = fields.get("model")
    if model is None:
        raise RequestError(
            "the field 'model' is required; GET /v1/models lists the available models",
            "model",
            "missing_required_parameter",
        )
    if not isinstance(model, str):
        raise RequestError("model: must be a string", "model", "invalid_value")
    return model


def _string(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    return value if isinstance(value, str) and value else None


def _session(fields: dict[str, Any]) -> str | None:
    for name in _SESSION_FIELDS:
        if (session := _string(fields, name)) is not None:
            return session
    metadata = fields.get("metadata")  # Anthropic's API
    return _string(metadata, "user_id") if isinstance(metadata, dict) else None


def _completion(prompt: Any) -> bytes:
    """Return the bytes of a completion prompt: a text, a list of token ids, or a list of such prompts."""
    if isinstance(prompt, str):
        return prompt.encode()
    if not isinstance(prompt, list) or not prompt:
        return b""
    if isinstance(prompt[0], int):
        return _tokens(prompt)
    return b"\x1e".join(
        each.encode() if isinstance(each, str) else _tokens(each) for each in prompt if isinstance(each, str | list)
    )


def _tokens(token_ids: list[Any]) -> bytes:
    try:
        return array("i", token_ids).tobytes()  # 4 bytes for each token, about the average length of a token's text
    except (TypeError, OverflowError):
        return _dump(token_ids).encode()


def _add_item(item: Any, pieces: list[str]) -> None:
    """Append the text of a message or another conversation item."""
    if not isinstance(item, dict):
        pieces += ("\x1e", _dump(item))
        return
    role = item.get("role")
    pieces += ("\x1e", role if isinstance(role, str) else "", "\x1f")
    content = item.get("content")
    if content is not None:
        _add_content(content, pieces)
    for name in _CALLS:
        if value := item.get(name):
            pieces += ("\x1f", value if isinstance(value, str) else _dump(value))


def _add_content(content: Any, pieces: list[str]) -> None:
    """Append the text of a content: a string, or a list of parts."""
    if isinstance(content, str):
        pieces.append(content)
        return
    for part in content if isinstance(content, list) else (content,):
        if isinstance(part, dict):
            text = part.get("text")
            if not isinstance(text, str):
                text = _dump(_without_hint(part))
            elif text.startswith(_BILLING):
                continue
            pieces.append(text)
        else:
            pieces.append(part if isinstance(part, str) else _dump(part))


def _without_hint(value: Any) -> Any:
    """Return a tool or a content part without its cache-control hint."""
    if not isinstance(value, dict) or "cache_control" not in value:
        return value
    return {name: each for name, each in value.items() if name != "cache_control"}


def _dump(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # nested more deeply than servers accept
        return ""
