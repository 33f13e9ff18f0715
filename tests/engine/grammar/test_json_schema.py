"""Random schemas and instances, checked by `jsonschema`: a grammar writes exactly what is valid."""

from __future__ import annotations

import copy
import json
import math
import random
from collections import Counter
from typing import Any

import jsonschema
import pytest

from stoker_common.errors import RequestError

from .byte_matcher import MAX_ORDERS, STYLES, ByteMatcher
from .schema_strategies import DRAFTS, Drawing, Instances, subschemas

VALIDATORS = {"2020-12": jsonschema.Draft202012Validator, "7": jsonschema.Draft7Validator}
NUM_SCHEMAS = 250
NUM_INSTANCES = 10

#: All keywords that can make an instance invalid.
KEYWORDS = {
    *("type", "const", "enum", "allOf", "anyOf", "oneOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "pattern"),
    *("items", "minItems", "maxItems"),
    *("properties", "required", "patternProperties", "additionalProperties", "minProperties", "maxProperties"),
}
OF_DRAFT = {"2020-12": {"prefixItems", "unevaluatedProperties"}, "7": {"additionalItems"}}

#: Permitted reasons to refuse a generated schema.
REFUSALS = (
    "oneOf constraints are not supported",  # its options may overlap
    "additionalItems is not supported beside",
    "the keyword unevaluatedProperties is not supported",  # beside anyOf and similar
    "min/maxProperties only supported when",  # some properties are optional, and additional ones permitted
    "patternProperty regexes",  # they may overlap
    "circular references with sibling keys",
    "Unsatisfiable schema",
    "the schema is false",
)
#: Keywords that no grammar can express, with values that have an effect.
UNSUPPORTED: dict[str, Any] = {
    "not": {"type": "null"},
    "if": {"type": "string"},
    "contains": {"const": 1},
    "uniqueItems": True,
    "propertyNames": {"maxLength": 3},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "dependencies": {"a": ["b"]},
    "unevaluatedItems": False,
    "unevaluatedProperties": {"type": "null"},
    "$dynamicRef": "#a",
    "$recursiveRef": "#",
}


@pytest.fixture(scope="module")
def bytes_() -> ByteMatcher:
    return ByteMatcher()


def num_orders(value: Any) -> int:
    if isinstance(value, dict):
        return math.factorial(len(value)) * math.prod(map(num_orders, value.values()))
    return math.prod(map(num_orders, value)) if isinstance(value, list) else 1


def drawn(draft: str, number: int) -> tuple[random.Random, dict[str, Any]]:
    rng = random.Random(f"{draft}/{number}")
    return rng, Drawing(rng, draft).schema()


@pytest.mark.parametrize("draft", DRAFTS)
def test_grammars_write_exactly_the_valid_instances(draft: str, bytes_: ByteMatcher) -> None:
    counts: Counter[bool | str] = Counter()
    rejecting_keywords: Counter[str | int] = Counter()
    for number in range(NUM_SCHEMAS):
        rng, schema = drawn(draft, number)
        VALIDATORS[draft].check_schema(schema)
        validator = VALIDATORS[draft](schema)
        try:
            source = bytes_.compile(json=schema)
        except RequestError as error:
            assert error.message.startswith(REFUSALS), f"{schema}: {error.message}"
            counts["refused"] += 1
            continue
        counts["$ref"] += any("$ref" in inner for inner in subschemas(schema))
        instances = Instances(rng, schema)
        for instance in (instances.draw() for _ in range(NUM_INSTANCES)):
            if num_orders(instance) > MAX_ORDERS:
                counts["not tried"] += 1
                continue
            paths = [error.absolute_schema_path for error in validator.iter_errors(instance)]
            written = bytes_.writes(source, instance, **rng.choice(STYLES))
            assert written == (not paths), f"{json.dumps(schema)}: {json.dumps(instance)}: {paths}"
            counts[written] += 1
            rejecting_keywords.update({word for path in paths for word in path})
    assert counts["refused"] < NUM_SCHEMAS // 5, counts
    assert min(counts[True], counts[False]) > NUM_SCHEMAS * NUM_INSTANCES // 4, counts
    rare_keywords = {keyword for keyword in KEYWORDS | OF_DRAFT[draft] if rejecting_keywords[keyword] < 3}
    assert not rare_keywords, rejecting_keywords
    assert counts["$ref"] > 20, counts


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_unsupported_keywords_are_refused_at_any_depth(keyword: str, bytes_: ByteMatcher) -> None:
    for number in range(20):
        rng, schema = drawn("2020-12", number)
        schema = copy.deepcopy(schema)
        subschema = rng.choice(list(subschemas(schema)))
        subschema[keyword] = UNSUPPORTED[keyword]
        if keyword == "if":
            subschema["else"] = {"type": "null"}
        with pytest.raises(RequestError) as refused:
            bytes_.compile(json=schema)
        assert refused.value.message.startswith(f"the keyword {keyword} is not supported"), schema
        assert refused.value.param == "structured_outputs.json"


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date-time", ["2024-02-29T12:30:59Z", "1999-12-31T23:59:00.5+01:30"], ["2024-02-29", "2024-13-01T00:00:00Z"]),
        ("time", ["00:00:00Z", "23:59:59.999-08:00"], ["24:00:00Z", "12:00:00", "12:00Z"]),
        ("date", ["2024-02-29", "0001-12-31"], ["2024-2-29", "2024-00-10", "2024-01-32", "20240101"]),
        ("duration", ["P1Y2M3DT4H5M6S", "PT0S", "P2W"], ["P", "1D", "P1S", "PT"]),
        ("email", ["fox@example.com", "a.b+c@d.example"], ["fox", "@example.com", "fox@", "a b@c.d"]),
        ("hostname", ["example.com", "a-b.c1"], ["-a.com", "a..b", "a_b", "a" * 64]),
        ("ipv4", ["0.0.0.0", "192.168.255.1"], ["256.0.0.1", "1.2.3", "01.2.3.4", "1.2.3.4.5"]),
        ("ipv6", ["::", "::1", "fe80::a:0", "1:2:3:4:5:6:7:8"], ["1:2:3:4:5:6:7", "::g", "1::2::3", "12345::"]),
        ("uuid", ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea"]),
        (
            "uri",
            ["https://example.com/a?b=c#d", "urn:x:1", "mailto:a@b.c"],
            ["/a", "a b:c", "//example.com", "http://["],
        ),
    ],
)
def test_formats_accept_valid_strings_only(name: str, good: list[str], bad: list[str], bytes_: ByteMatcher) -> None:
    source = bytes_.compile(json={"type": "string", "format": name})
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for text in (*good, *bad):
        if name in checker.checkers and name != "email":  # it only checks the @
            assert checker.conforms(text, name) == (text in good), text
        assert bytes_.accepts(source, json.dumps(text)) == (text in good), text
