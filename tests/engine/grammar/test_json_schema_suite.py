"""The JSON Schema Test Suite against grammars: what they accept is valid, or the schema is refused by name.

`json_schema_test_suite.json` holds the suite's groups for drafts 2020-12 and 7 (each of draft 7 that differs), without
those of remote references and of formats that nobody here knows: [description, schema, [[instance, valid], …]].
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker_engine.contract.errors import RequestError

from .byte_matcher import ByteMatcher

SUITE = json.loads((Path(__file__).parent / "json_schema_test_suite.json").read_text(encoding="utf-8"))["groups"]

#: What a refusal may say. Anything else is a schema that should have been served.
REFUSALS = (
    *(f"the keyword {name} is not supported" for name in ("contains", "dependencies", "dependentRequired")),
    *(f"the keyword {name} is not supported" for name in ("dependentSchemas", "if", "not", "propertyNames")),
    *(f"the keyword {name} is not supported" for name in ("unevaluatedItems", "unevaluatedProperties", "uniqueItems")),
    "$id within a schema is not supported",
    "$ref: ",
    "additionalItems is not supported beside",
    "oneOf constraints are not supported",  # where its options may overlap
    "patternProperty regexes",  # that may overlap
    "the format ",
    "Value for 'multipleOf' has too many digits",
)
#: Schemas that nothing is valid by.
IMPOSSIBLE = ("Unsatisfiable schema", "the schema is false")

#: Valid instances that no grammar writes. Formats are kept here, and are annotations there.
UNWRITTEN = {
    "draft2020-12/format": "kept",
    "draft2020-12/optional/format/email": "quoted and bracketed addresses",
    "draft2020-12/optional/format/ipv6": "IPv4 within IPv6",
    "draft2020-12/unevaluatedProperties": "annotations of an if without then",
    "draft7/ref": "keywords beside $ref are kept as well",
}
#: Formats whose grammar is wider than they are: calendars, leap seconds, Punycode.
WIDE_FORMATS = ("date", "date-time", "time", "hostname")


@pytest.fixture(scope="module")
def bytes_() -> ByteMatcher:
    return ByteMatcher()


def orders(value: Any) -> Iterator[Any]:
    """`value` with its properties in every order: a grammar has one."""
    if isinstance(value, dict):
        for keys in itertools.permutations(value):
            for inner in itertools.product(*(list(orders(value[key])) for key in keys)):
                yield dict(zip(keys, inner, strict=True))
    elif isinstance(value, list):
        for inner in itertools.product(*(list(orders(each)) for each in value)):
            yield list(inner)
    else:
        yield value


def writes(bytes_: ByteMatcher, source: str, instance: Any) -> bool:
    written = {
        bytes_.accepts(source, json.dumps(order, ensure_ascii=False, **style))
        for order in itertools.islice(orders(instance), 200)
        for style in ({"separators": (",", ":")}, {}, {"indent": 2}, {"indent": "\t"})
    }
    return True in written


def whole_floats(value: Any) -> bool:
    """Whether it holds a number such as 1.0, which is an integer to JSON Schema; no grammar writes it so."""
    if isinstance(value, list):
        return any(map(whole_floats, value))
    return isinstance(value, float) and value.is_integer()


@pytest.mark.parametrize("file", SUITE)
def test_only_what_is_valid_is_written(file: str, bytes_: ByteMatcher) -> None:
    for description, schema, instances in SUITE[file]:
        try:
            source = bytes_.compile(json=schema)
        except RequestError as error:
            refusals = REFUSALS if any(valid for _, valid in instances) else (*REFUSALS, *IMPOSSIBLE)
            assert error.message.startswith(refusals), f"{description}: {error.message}"
            assert error.param == "structured_outputs.json"
            continue
        for instance, valid in instances:
            written = writes(bytes_, source, instance)
            where = f"{description}: {json.dumps(schema)}: {json.dumps(instance)}"
            if written and not valid:
                assert file.split("/optional/format/")[-1] in WIDE_FORMATS, where
            if valid and not written:
                assert file in UNWRITTEN or whole_floats(instance), where


def test_most_of_the_suite_is_served(bytes_: ByteMatcher) -> None:
    """A keyword that is refused without need would go unnoticed above."""
    counts: Counter[bool] = Counter()
    for groups in SUITE.values():
        for _, schema, instances in groups:
            try:
                bytes_.compile(json=schema)
                counts[True] += len(instances)
            except RequestError:
                counts[False] += len(instances)
    assert counts[True] >= 1330, counts
