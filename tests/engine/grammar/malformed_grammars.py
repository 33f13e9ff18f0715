"""Unusual constraints: mutated and growing schemas, regular expressions and grammars."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}}, "required": ["a"]},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 1, "maxItems": 3},
    {"$ref": "#/$defs/t", "$defs": {"t": {"properties": {"n": {"$ref": "#/$defs/t"}}, "additionalProperties": False}}},
    {"anyOf": [{"const": 1}, {"enum": ["a", None, [1]]}, {"type": "string", "pattern": "^a+b?$"}]},
    {"allOf": [{"type": "number", "multipleOf": 0.5}, {"exclusiveMinimum": 1.5}]},
    {"type": "string", "format": "date-time"},
    {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "minProperties": 1, "maxProperties": 2},
    {"oneOf": [{"type": "integer"}, {"type": "string"}], "$schema": "http://json-schema.org/draft-07/schema#"},
]
REGEXES = [r"[a-z]{2,5}-\d+", r"(?:yes|no)+", r"^(\w+\s?){1,9}$", r"[^\x00-\x1f]*", r"(a|b)*a(a|b){3}", r"\p{L}é?"]
GRAMMARS = [
    'start: a+\na: "x" | "(" start ")"\n',
    'root ::= "a" b | [0-9]{1,3}\nb ::= "x"* root?\n',
    'start: A %json {"type": "object"}\nA: /[a-z]+/ & ~/bad/\n%ignore / /\n',
    'start: x "<" y\nx[lazy]: /.*;/\ny: %regex {"substring_chars": "abcdef"}\n',
]
TAGS: list[Any] = [
    {"triggers": ["<f"], "structures": [{"begin": "<f=x>", "schema": {"type": "object"}, "end": "</f>"}]},
    {"format": {"type": "sequence", "elements": [{"type": "const_string", "value": "a"}, {"type": "any_text"}]}},
]
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 2**31, 2**63, 10**40, 10**9, 1e308, 1e-308),
    *("", "a", "\x00", "\ud800", "🦊", "#", "#/", "#/$defs/t", "#/allOf", "(", "(?=a)", ".*", "object", "a" * 3000),
    *([], {}, [[]], [None], {"": {}}, {"$ref": "#"}, {"type": "object"}, ["a"] * 300, {"not": {}}),
]
BOUNDS = (0, 1, 2, 1000, 10**5, 10**9, 2**31, 2**63, 2**64)


def constraints(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield `count` constraints, the same for each seed."""
    rng = random.Random(seed)
    for _ in range(count):
        yield rng.choice((_schema, _schema, _regex, _grammar, _tag, _choice))(rng)


def growing(size: int) -> Iterator[dict[str, Any]]:
    """Yield constraints that look small but are expensive."""
    chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 3} for i in range(size)}
    yield {"json": {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{size}": {"type": "object"}}}}
    doubling = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "properties": {f"p{i}": {}}} for i in range(size)
    }
    yield {"json": {"$ref": "#/$defs/d0", "$defs": {**doubling, f"d{size}": {"type": "object"}}}}
    deep: dict[str, Any] = {}
    for _ in range(size * 2):
        deep = {"items": deep}
    yield {"json": deep}
    yield {"json": '{"items":' * size * 100 + "{}" + "}" * size * 100}
    yield {"json": {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(size)]}}
    yield {"json": {"enum": ["x" * 50 + str(i) for i in range(size * 300)]}}
    yield {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(size * 100)}}}
    yield {"json": {"type": "string", "minLength": 10**9, "maxLength": 10**9, "pattern": "^(a{1000}){1000}$"}}
    yield {"json": {"type": "array", "items": {"type": "array", "minItems": 10**6}, "minItems": 10**6}}
    yield {"regex": f"((a{{0,{size}}}b?){{0,{size}}}c?){{0,{size}}}"}
    yield {"regex": f"(a|b)*a(a|b){{{size * 10}}}"}
    yield {"regex": "(" * size * 200 + ")" * size * 200}
    yield {"regex": "(abc|def)" * size * 500}
    yield {"regex": r"(?i)(\w\W){100}\p{L}{200}"}
    yield {"grammar": "start: " + "(" * size * 500 + '"a"' + ")" * size * 500}
    yield {"grammar": "start: r0\n" + "".join(f'r{i}: r{i + 1} r{i + 1} | "x"\n' for i in range(size * 100)) + "r"}
    yield {"grammar": "start: A\nA: " + " & ".join(f"~/(a|b)*a(a|b){{{i}}}/" for i in range(1, size))}
    yield {"grammar": 'start: (("a"{0,1000}){0,1000}){0,1000}'}
    yield {"choice": ["x" * 1000 + str(i) for i in range(size * 20)]}
    yield {"structural_tag": {"format": _nested(size * 5)}}


def _nested(depth: int) -> dict[str, Any]:
    tag: dict[str, Any] = {"type": "any_text"}
    for _ in range(depth):
        tag = {"type": "tag", "begin": "<", "content": tag, "end": ">"}
    return tag


def _mutated(rng: random.Random, value: Any) -> Any:
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        holders = [value]
        for holder in holders:
            inner = holder.values() if isinstance(holder, dict) else holder
            holders += [each for each in inner if isinstance(each, dict | list) and each]
        holder = rng.choice(holders)
        odd = copy.deepcopy(rng.choice([*ODD, rng.choice(BOUNDS), rng.choice(SCHEMAS), rng.choice(REGEXES)]))
        if isinstance(holder, dict):
            keys = [*holder, rng.choice(("minLength", "maxItems", "not", "pattern", "$ref", "", "x-guidance", "type"))]
            holder[rng.choice(keys)] = odd
        else:
            holder[rng.randrange(len(holder))] = odd
    return value


def _edited(rng: random.Random, text: str) -> str:
    for _ in range(rng.choice((1, 2, 4))):
        index = rng.randrange(len(text) + 1)
        piece = rng.choice(
            ["(", ")", "[", "]", "{0,1000000000}", "|", "*", "+", "~", "&", '"', "\\", "\x00", "🦊", "<"]
        )
        cut = rng.choice((0, 0, 1, 3))
        text = text[:index] + piece + text[index + cut :]
    return text


def _schema(rng: random.Random) -> dict[str, Any]:
    return {"json": _mutated(rng, rng.choice(SCHEMAS))}


def _regex(rng: random.Random) -> dict[str, Any]:
    return {"regex": _edited(rng, rng.choice(REGEXES))}


def _grammar(rng: random.Random) -> dict[str, Any]:
    return {"grammar": _edited(rng, rng.choice(GRAMMARS))}


def _tag(rng: random.Random) -> dict[str, Any]:
    return {"structural_tag": _mutated(rng, rng.choice(TAGS))}


def _choice(rng: random.Random) -> dict[str, Any]:
    return {"choice": [_edited(rng, rng.choice(REGEXES)) for _ in range(rng.choice((1, 5, 50)))]}
