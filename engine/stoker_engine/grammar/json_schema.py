"""Prepares JSON Schemas for llguidance, and rejects constraints that it would ignore.

If a schema is accepted, each complete output satisfies it. llguidance alone does not ensure this: it ignores keywords
that the schema's draft does not have, and reads numbers as floats. Therefore each schema is checked here first.

https://json-schema.org/draft/2020-12; llguidance's docs/json_schema.md lists the implemented keywords.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn
from urllib.parse import quote, unquote

from stoker_common.errors import RequestError
from stoker_engine.grammar.limits import MAX_LENGTH, MAX_NESTING
from stoker_engine.grammar.regex_dialect import in_dialect

#: Supported values of ``$schema``. All drafts are read as the latest one, which has the most keywords.
_DRAFTS: Final = re.compile(r"https?://json-schema\.org/(draft/(2020-12|2019-09)|draft-0[467])/schema#?")

#: Keywords of any draft that a grammar cannot express → values without effect, which are accepted.
_UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "$dynamicRef": (),
    "$recursiveRef": (),
    "contains": (),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "disallow": (),
    "divisibleBy": (),
    "extends": (),
    "not": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
#: Keywords that have no effect unless another keyword is present. They are removed after the check for that keyword.
_DEPENDENT: Final = ("if", "then", "else", "minContains", "maxContains", "$recursiveAnchor", "$vocabulary")

_SCHEMA: Final = ("additionalProperties", "additionalItems", "items")
_SCHEMAS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED_SCHEMAS: Final = ("properties", "patternProperties", "$defs", "definitions")
_IN_PLACE: Final = ("$ref", "allOf", "anyOf", "oneOf")
_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")
_COUNTS: Final = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")

_FORMATS: Final = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")


def prepare_schema(source: Any, param: str, closed: bool = False) -> Any:
    """Return the schema in a form that llguidance either compiles completely or rejects.

    Args:
        source: the schema: an object, a boolean, or the JSON text of one.
        param: the request's field that contains it.
        closed: whether objects with named properties allow no others by default.

    Raises:
        RequestError: it is not a schema, is too large, or uses an unsupported keyword, which the message names.
    """
    schema = _parse(source, param)
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise RequestError(f"a JSON Schema must be an object or a boolean, not {_kind(schema)}", param)
    _check_nesting(schema, param)
    return _Preparation(schema, param, closed).done()


def _parse(source: Any, param: str) -> Any:
    if not isinstance(source, str):
        try:
            source = json.dumps(source, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise RequestError(f"this is not a valid JSON Schema: {error}", param) from None
    if len(source) > MAX_LENGTH:
        raise RequestError(f"the schema has {len(source)} characters; at most {MAX_LENGTH} are allowed", param)
    try:
        return json.loads(source, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep(param) from None
    except ValueError as error:
        raise RequestError(f"the schema is not valid JSON: {error}", param) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


def _check_nesting(schema: Any, param: str) -> None:
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise _too_deep(param)
        inner = (value.values() if isinstance(value, dict) else value for value in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list) and value]


def _too_deep(param: str) -> RequestError:
    return RequestError(f"the schema nests objects and arrays more than {MAX_NESTING} deep; use $ref for parts", param)


def _kind(value: Any) -> str:
    return {"list": "a list", "str": "a string", "NoneType": "null"}.get(type(value).__name__, "a number")


class _Preparation:
    """Checks a copy of one schema recursively, and modifies the copy in place."""

    def __init__(self, schema: dict[str, Any], param: str, closed: bool) -> None:
        self._root = copy.deepcopy(schema)
        self._param = param
        self._closed = closed
        self._seen: set[int] = set()
        self._refs: list[tuple[dict[str, Any], str]] = []
        self._anchors: dict[str, str] = {}
        self._uri = ""
        self._is_draft4 = False

    def done(self) -> dict[str, Any]:
        root = self._root
        if "x-guidance" in root:
            self._refuse("#", "the keyword x-guidance is not supported; remove it")
        draft = root.pop("$schema", None)
        self._is_draft4 = isinstance(draft, str) and "draft-04" in draft
        uri = root.pop("id" if self._is_draft4 else "$id", None)
        self._uri = uri.partition("#")[0] if isinstance(uri, str) else ""
        if draft is not None and not (isinstance(draft, str) and _DRAFTS.fullmatch(draft)):
            self._refuse("#", f"$schema {str(draft)[:100]!r} is not supported; use JSON Schema's drafts 4 to 2020-12")
        self._walk(root, "#")
        while self._refs:
            schema, pointer = self._refs.pop()
            self._resolve(schema, pointer)
        return root

    def _refuse(self, pointer: str, sentence: str) -> NoReturn:
        raise RequestError(f"{sentence} (at {pointer[:200]})", self._param)

    def _unsupported(self, keyword: str, pointer: str) -> NoReturn:
        self._refuse(pointer, f"the keyword {keyword} is not supported, because a grammar cannot express it; remove it")

    def _walk(self, schema: Any, pointer: str) -> None:
        if not isinstance(schema, dict) or id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        self._check_keywords(schema, pointer)
        for name in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.pop(name, None), str):
                self._anchors[anchor] = pointer
        if "$ref" in schema:
            self._refs.append((schema, pointer))
        for inner, inner_pointer in _subschemas(schema, pointer):
            self._walk(inner, inner_pointer)
        names = any(isinstance(schema.get(name), dict) for name in ("properties", "patternProperties"))
        if self._closed and names:
            schema.setdefault("additionalProperties", False)

    def _check_keywords(self, schema: dict[str, Any], pointer: str) -> None:
        if pointer != "#":
            schema.pop("$schema", None)
            if isinstance(schema.get("$id"), str) or (self._is_draft4 and isinstance(schema.get("id"), str)):
                self._refuse(pointer, "$id is only supported at the root of a schema; remove it")
        if schema.get("unevaluatedProperties") is False and not any(name in schema for name in _IN_PLACE):
            del schema["unevaluatedProperties"]
            schema.setdefault("additionalProperties", False)
        for name, neutral in _UNSUPPORTED.items():
            if name in schema:
                stated = schema.pop(name)
                if not any(_same(stated, value) for value in neutral):
                    self._unsupported(name, pointer)
        if "if" in schema and not schema.keys().isdisjoint(("then", "else")):
            self._unsupported("if", pointer)
        for name in _DEPENDENT:
            schema.pop(name, None)
        if "additionalItems" in schema and not schema.keys().isdisjoint((*_IN_PLACE, "const", "enum", "prefixItems")):
            self._refuse(pointer, "additionalItems is not supported beside other keywords; use prefixItems and items")
        self._check_values(schema, pointer)

    def _check_values(self, schema: dict[str, Any], pointer: str) -> None:
        for name in _COUNTS:
            if isinstance(count := schema.get(name), float) and count.is_integer():
                schema[name] = int(count)
        for name in _NUMBERS:
            for number in _numbers(schema.get(name)):
                if isinstance(number, int) and not _is_exact(number):
                    self._refuse(pointer, f"{name}: {str(number)[:40]} is too large; integers are exact up to 2**53")
        if isinstance(schema.get("pattern"), str):
            schema["pattern"] = self._pattern(schema["pattern"], pointer)
        if isinstance(patterns := schema.get("patternProperties"), dict):
            schema["patternProperties"] = self._patterns(patterns, pointer)
        self._check_format(schema, pointer)
        self._check_min_properties(schema, pointer)

    def _patterns(self, patterns: dict[str, Any], pointer: str) -> dict[str, Any]:
        read: dict[str, Any] = {}
        for pattern, schema in patterns.items():
            same = self._pattern(pattern, pointer)
            read[same] = {"allOf": [read[same], schema]} if same in read else schema
        return read

    def _pattern(self, pattern: str, pointer: str) -> str:
        try:
            return in_dialect(pattern)
        except ValueError as error:
            self._refuse(pointer, f"pattern {pattern[:100]!r}: {error}")

    def _check_format(self, schema: dict[str, Any], pointer: str) -> None:
        """Reject unsupported formats of strings. Formats of other types have no effect."""
        kind = schema.get("type", "string")
        is_string = "string" in (kind if isinstance(kind, list) else [kind])
        if is_string and schema.get("format", "date") not in _FORMATS:
            name = str(schema["format"])[:100]
            self._refuse(pointer, f"the format {name!r} is not supported; remove it, or use {', '.join(_FORMATS)}")

    def _check_min_properties(self, schema: dict[str, Any], pointer: str) -> None:
        """Reject a `minProperties` above the number of required properties + 1, unless only named ones are allowed: the
        grammar permits an output to repeat a name, which JSON counts as one property."""
        least = schema.get("minProperties")
        required = schema.get("required")
        named = set(map(str, required)) if isinstance(required, list) else set()
        closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        if isinstance(least, int) and least > len(named) + 1 and not closed:
            self._refuse(
                pointer,
                f"minProperties: {least} is not supported for unnamed properties; list the properties in required, "
                "or set additionalProperties to false",
            )

    def _resolve(self, schema: dict[str, Any], schema_pointer: str) -> None:
        """Replace a reference by a pointer into this schema, and check its target."""
        reference = schema["$ref"]
        if not isinstance(reference, str):
            self._refuse(schema_pointer, "$ref must be a string")
        ref = reference.removeprefix(self._uri) if self._uri and reference.startswith(f"{self._uri}#") else reference
        if not ref.startswith("#"):
            self._refuse(
                schema_pointer, f"$ref: {reference[:100]!r} is outside this schema; move its target into $defs"
            )
        pointer = unquote(ref[1:])
        if pointer and not pointer.startswith("/"):
            if pointer not in self._anchors:
                self._refuse(schema_pointer, f"$ref: there is no $anchor {pointer[:100]!r}")
            schema["$ref"] = quote(self._anchors[pointer], safe="#/$~")
            return
        schema["$ref"] = ref
        target: Any = self._root
        for segment in pointer.split("/")[1:]:
            key = segment.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key and key in target:
                target = target[key]
            elif isinstance(target, list) and re.fullmatch("[0-9]{1,9}", key) and int(key) < len(target):
                target = target[int(key)]
            else:
                self._refuse(schema_pointer, f"$ref: {reference[:100]!r} does not exist")
        if not isinstance(target, dict | bool):
            self._refuse(schema_pointer, f"$ref: {reference[:100]!r} is not a schema")
        self._walk(target, ref)


def _subschemas(schema: dict[str, Any], pointer: str) -> Iterator[tuple[Any, str]]:
    for name in _SCHEMA:
        if isinstance(schema.get(name), dict):
            yield schema[name], f"{pointer}/{name}"
    for name in _SCHEMAS:
        if isinstance(schema.get(name), list):
            for index, inner in enumerate(schema[name]):
                yield inner, f"{pointer}/{name}/{index}"
    for name in _NAMED_SCHEMAS:
        if isinstance(schema.get(name), dict):
            for key, inner in schema[name].items():
                yield inner, f"{pointer}/{name}/{key.replace('~', '~0').replace('/', '~1')}"


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def _is_exact(number: int) -> bool:
    return abs(number) <= 2**53


def _same(value: Any, neutral: Any) -> bool:
    """Compare two values by type and value: 0 differs from false."""
    return type(value) is type(neutral) and bool(value == neutral)
