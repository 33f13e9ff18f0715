"""Random JSON Schemas with all supported keywords, and random instances of a schema: some valid, some almost."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

#: ``$schema`` of the generated drafts.
DRAFTS = {"2020-12": "https://json-schema.org/draft/2020-12/schema", "7": "http://json-schema.org/draft-07/schema#"}

_NAMES = ("a", "größe", "x y", 'q"')
_PATTERN_NAMES = {"^x-": ("x-1", "x-é"), "[0-9]$": ("n0", "7")}
_STRINGS = ("", "a", "ab", "abc", "aab", "bca", "é🦊", 'q"\\', "\n\t-", "aaaaaa", "12", "2024-02-28")
_PATTERNS = ("^a+b?$", "b", "^[a-c]{2,3}$", "^(ab|ba)*c", "^[^a]*$", r"^\d+$", "a.?b|🦊")
_SCALARS = (*_STRINGS, None, True, False, 0, 1, -1, 3, 7, 12, -40, 100, 0.5, -1.5, 2.25, 1.75, 99.5)
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


class Drawing:
    """Generates schemas of one draft."""

    def __init__(self, rng: random.Random, draft: str) -> None:
        self._rng = rng
        self._draft = draft
        self._defs = "$defs" if draft == "2020-12" else "definitions"
        self._num_defs = 0

    def schema(self) -> dict[str, Any]:
        """Return a whole schema; referenced schemas may be recursive."""
        self._num_defs = self._rng.choice((0, 0, 1, 2))
        depth = self._rng.choice((1, 2, 3))
        schema = self._object(depth) if self._rng.random() < 0.4 else self._any(depth)
        if isinstance(schema, bool):
            schema = {"type": "null"}
        if "$ref" in schema and self._draft == "7":
            schema = {"allOf": [schema]}
        if self._num_defs:
            kinds = (self._object, self._object, self._array, self._string, self._const)  # no references alone
            schema[self._defs] = {f"d{number}": self._rng.choice(kinds)(2) for number in range(self._num_defs)}
        return {"$schema": DRAFTS[self._draft], **schema}

    def _any(self, depth: int) -> Any:
        leaves = [self._number, self._string, self._integer, self._const, self._types]
        inner = [self._array, self._object, self._object, self._any_of, self._all_of, self._one_of]
        if self._rng.random() < 0.06:
            return self._rng.choice((True, True, {}, False))
        if self._num_defs and self._rng.random() < 0.2:
            return self._ref(depth)
        return self._rng.choice([*leaves, *(inner if depth > 0 else [])])(depth)

    def _maybe(self, schema: dict[str, Any], keyword: str, value: Any, probability: float = 0.4) -> None:
        if self._rng.random() < probability:
            schema[keyword] = value

    def _typed(self, kind: str, probability: float = 0.8) -> dict[str, Any]:
        return {"type": kind} if self._rng.random() < probability else {}

    def _integer(self, depth: int) -> Any:
        low = self._rng.randrange(-50, 12)
        schema: dict[str, Any] = {"type": "integer"}
        self._maybe(schema, self._rng.choice(("minimum", "exclusiveMinimum")), low)
        self._maybe(schema, self._rng.choice(("maximum", "exclusiveMaximum")), low + self._rng.randrange(2, 120))
        self._maybe(schema, "multipleOf", self._rng.choice((2, 3, 5)), 0.2)
        return schema

    def _number(self, depth: int) -> Any:
        low = self._rng.randrange(-20, 20) / 4
        schema = self._typed("number")
        self._maybe(schema, self._rng.choice(("minimum", "exclusiveMinimum")), low)
        self._maybe(schema, self._rng.choice(("maximum", "exclusiveMaximum")), low + self._rng.randrange(1, 90) / 4)
        if schema.keys() <= {"type"}:
            self._maybe(schema, "multipleOf", self._rng.choice((0.5, 2.5, 2)))
        return schema

    def _string(self, depth: int) -> Any:
        schema = self._typed("string")
        least = self._rng.randrange(4)
        self._maybe(schema, "minLength", least)
        self._maybe(schema, "maxLength", least + self._rng.randrange(4))
        self._maybe(schema, "pattern", self._rng.choice(_PATTERNS), 0.3)
        return schema

    def _const(self, depth: int) -> Any:
        values = [*_SCALARS, [], [1, "a"], {"a": 1, "b": [None]}, {}]
        if self._rng.random() < 0.5:
            return {"const": self._rng.choice(values)}
        return {"enum": self._rng.sample(values, self._rng.randrange(1, 5))}

    def _types(self, depth: int) -> Any:
        kinds = self._rng.sample(_TYPES, self._rng.choice((1, 1, 2, 3)))
        return {"type": kinds if len(kinds) > 1 else kinds[0], "title": "t", "default": 3, "examples": [{"not": {}}]}

    def _array(self, depth: int) -> Any:
        schema = self._typed("array")
        first = [self._any(depth - 1) for _ in range(self._rng.randrange(1, 3))]
        each = self._any(depth - 1)
        tuple_, rest = ("prefixItems", "items") if self._draft == "2020-12" else ("items", "additionalItems")
        match self._rng.randrange(4):
            case 0:
                schema[tuple_] = first
                self._maybe(schema, rest, self._rng.choice((each, False)), 0.7)
            case 1 | 2:
                schema["items"] = each
        least = self._rng.randrange(3)
        self._maybe(schema, "minItems", least)
        self._maybe(schema, "maxItems", least + self._rng.randrange(3))
        return schema

    def _object(self, depth: int) -> Any:
        names = self._rng.sample(_NAMES, self._rng.randrange(4))
        schema = self._typed("object")
        if names:
            schema["properties"] = {name: self._any(depth - 1) for name in names}
        self._maybe(schema, "required", self._rng.sample(_NAMES, self._rng.randrange(3)), 0.5)
        if self._rng.random() < 0.25:
            pattern = self._rng.choice(list(_PATTERN_NAMES))
            schema["patternProperties"] = {pattern: self._any(depth - 1)}
        additional = self._rng.choice((False, False, True, self._any(min(depth - 1, 1))))
        name = "unevaluatedProperties" if additional is False and self._draft == "2020-12" else "additionalProperties"
        self._maybe(schema, self._rng.choice((name, *["additionalProperties"] * 4)), additional, 0.6)
        if schema.get("additionalProperties") is False or not names:
            self._maybe(schema, "minProperties", self._rng.choice((1, 1, 2)) if names else 1, 0.3)
            self._maybe(schema, "maxProperties", self._rng.randrange(1, 4), 0.3)
        return schema

    def _any_of(self, depth: int) -> Any:
        base = self._object(depth - 1) if self._rng.random() < 0.2 else {}
        return {**base, "anyOf": [self._any(depth - 1) for _ in range(self._rng.randrange(1, 4))]}

    def _all_of(self, depth: int) -> Any:
        kind = self._rng.choice((self._object, self._integer, self._string, self._array))
        return {**kind(depth - 1), "allOf": [kind(depth - 1) for _ in range(self._rng.randrange(1, 3))]}

    def _one_of(self, depth: int) -> Any:
        kinds = (self._integer, self._string, lambda _: {"type": "null"})
        if self._rng.random() < 0.5:
            return {"oneOf": [kind(depth) for kind in self._rng.sample(kinds, 2)]}
        tagged = [
            {"type": "object", "properties": {"kind": {"const": word}, **self._object(depth - 1).get("properties", {})}}
            for word in ("fox", "dog")
        ]
        return {"oneOf": [{**option, "required": ["kind"]} for option in tagged]}

    def _ref(self, depth: int) -> Any:
        schema = {"$ref": f"#/{self._defs}/d{self._rng.randrange(self._num_defs)}"}
        if self._draft == "2020-12" and self._rng.random() < 0.2:  # draft 7 ignores siblings
            schema.update(self._rng.choice((self._string, self._object))(max(depth - 1, 0)))
        return schema


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the object schemas within a generated one, including itself."""
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties", "$defs", "definitions"):
            for inner in value.values():
                yield from subschemas(inner)
        elif keyword in ("allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalItems", "additionalProperties"):
            for inner in value if isinstance(value, list) else [value]:
                yield from subschemas(inner)


class Instances:
    """Generates instances that mostly match a schema; their validity is checked elsewhere."""

    def __init__(self, rng: random.Random, schema: dict[str, Any]) -> None:
        self._rng = rng
        self._root = schema

    def draw(self) -> Any:
        """Return an instance, sometimes changed in one or two places."""
        drawn = self._by(self._root, 5)
        for _ in range(self._rng.choice((0, 0, 1, 1, 2))):
            drawn = self._changed(drawn)
        return drawn

    def _by(self, schema: Any, depth: int) -> Any:
        if not isinstance(schema, dict) or depth < 0:
            return self._rng.choice((*_SCALARS, [], {}, [1], {"a": None}))
        if "const" in schema or "enum" in schema:
            return copy.deepcopy(schema["const"] if "const" in schema else self._rng.choice(schema["enum"]))
        drawn = [self._by_type(schema, depth)] if schema.keys() - {"$ref", "anyOf", "oneOf", "allOf"} else []
        if "$ref" in schema:
            _, where, name = schema["$ref"].split("/")
            drawn.append(self._by(self._root[where][name], depth - 1))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                drawn.append(self._by(self._rng.choice(schema[keyword]), depth - 1))
        drawn += [self._by(option, depth - 1) for option in schema.get("allOf", ())]
        if drawn and all(isinstance(each, dict) for each in drawn):
            return {name: value for each in drawn for name, value in each.items()}
        return self._rng.choice(drawn) if drawn else self._rng.choice(_SCALARS)

    def _by_type(self, schema: dict[str, Any], depth: int) -> Any:
        kinds = schema.get("type") or _implied(schema)
        match self._rng.choice(kinds) if isinstance(kinds, list) else kinds:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._string(schema)
            case "integer" | "number" as kind:
                return self._number(schema, kind)
            case "boolean":
                return self._rng.random() < 0.5
        return None

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        drawn = {}
        for name, inner in schema.get("properties", {}).items():
            if name in schema.get("required", ()) or self._rng.random() < 0.6:
                drawn[name] = self._by(inner, depth - 1)
        for name in schema.get("required", ()):
            drawn.setdefault(name, self._by(schema.get("additionalProperties"), depth - 1))
        for pattern, inner in schema.get("patternProperties", {}).items():
            if self._rng.random() < 0.5:
                drawn[self._rng.choice(_PATTERN_NAMES[pattern])] = self._by(inner, depth - 1)
        if schema.get("additionalProperties") is not False and self._rng.random() < 0.3:
            drawn["other"] = self._by(schema.get("additionalProperties"), depth - 1)
        return drawn

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        least = schema.get("minItems", 0)
        count = self._rng.randrange(max(least - 1, 0), schema.get("maxItems", least + 2) + 2)
        first, rest = schema.get("prefixItems"), schema.get("items")
        if isinstance(rest, list):
            first, rest = rest, schema.get("additionalItems")
        each = [*(first or []), *[rest] * count][:count]
        return [self._by(inner, depth - 1) for inner in each]

    def _string(self, schema: dict[str, Any]) -> str:
        least = schema.get("minLength", 0) - self._rng.choice((0, 0, 1))
        longest = schema.get("maxLength", 9) + self._rng.choice((0, 0, 1))
        return self._rng.choice([each for each in _STRINGS if least <= len(each) <= longest] or list(_STRINGS))

    def _number(self, schema: dict[str, Any], kind: str) -> float:
        low = schema.get("minimum", schema.get("exclusiveMinimum", -9))
        high = schema.get("maximum", schema.get("exclusiveMaximum", low + 50))
        at = self._rng.choice((low, high, low + (high - low) * self._rng.random()))
        at = round(at + self._rng.choice((0, 0, 0.25, -0.25, 1, -1)), 2)
        number = int(at) if kind == "integer" else at
        return int(number) if number == int(number) else number

    def _changed(self, value: Any) -> Any:
        if isinstance(value, dict) and value and self._rng.random() < 0.8:
            name = self._rng.choice(list(value))
            match self._rng.randrange(5):
                case 0:
                    return {each: inner for each, inner in value.items() if each != name}
                case 1:
                    return {**value, self._rng.choice(("other", "x-1", "7", *_NAMES)): self._rng.choice(_SCALARS)}
            return {**value, name: self._changed(value[name])}
        if isinstance(value, list) and value and self._rng.random() < 0.8:
            index = self._rng.randrange(len(value))
            middle = self._rng.choice(([], [value[index]] * 2, [self._changed(value[index])]))
            return [*value[:index], *middle, *value[index + 1 :]]
        if isinstance(value, str) and self._rng.random() < 0.6:
            return self._rng.choice((value + "a", value[1:], value.upper(), value + "🦊", value * 2))
        if isinstance(value, int) and not isinstance(value, bool) and self._rng.random() < 0.6:
            return value + self._rng.choice((1, -1, 100, -100, 0.5))
        return copy.deepcopy(self._rng.choice((*_SCALARS, [], {}, [[]], {"a": {}})))


def _implied(schema: dict[str, Any]) -> str:
    """Return the type that the schema constrains."""
    for kind, words in {"object": "ropert", "array": "Items", "string": "Length", "number": "imum"}.items():
        if any(words in keyword or keyword == words.lower() for keyword in schema):
            return kind
    return "string" if "pattern" in schema else "object"
