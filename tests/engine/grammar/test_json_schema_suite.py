"""The JSON Schema Test Suite with grammars: what they accept is valid, or the schema is refused by name.

Opt in with ``STOKER_JSON_SCHEMA_TEST_SUITE``, a checkout of https://github.com/json-schema-org/JSON-Schema-Test-Suite.
Its groups for draft 2020-12 are used, and those of draft 7 that differ; `test_json_schema.py` uses random schemas.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stoker_common.errors import RequestError

from .byte_matcher import STYLES, ByteMatcher

CHECKOUT = os.environ.get("STOKER_JSON_SCHEMA_TEST_SUITE")

pytestmark = pytest.mark.skipif(
    CHECKOUT is None, reason="STOKER_JSON_SCHEMA_TEST_SUITE names no checkout of the JSON Schema Test Suite"
)

#: Permitted messages of refusals. Schemas with other messages should have been supported.
REFUSALS = (
    *(f"the keyword {name} is not supported" for name in ("contains", "dependencies", "dependentRequired")),
    *(f"the keyword {name} is not supported" for name in ("dependentSchemas", "if", "not", "propertyNames")),
    *(f"the keyword {name} is not supported" for name in ("unevaluatedItems", "unevaluatedProperties", "uniqueItems")),
    "the keyword $dynamicRef is not supported",
    "$schema ",
    "$id is only supported at the root",
    "$ref: ",
    "additionalItems is not supported beside",
    "oneOf constraints are not supported",  # its options may overlap
    "patternProperty regexes",  # they may overlap
    "the format ",
    "Value for 'multipleOf' has too many digits",
)
#: Messages about unsatisfiable schemas.
IMPOSSIBLE = ("Unsatisfiable schema", "the schema is false")

#: Valid instances that no grammar writes. Formats are enforced here, but are annotations in the suite.
UNWRITTEN = {
    "draft2020-12/format": "kept",
    "draft2020-12/optional/format/email": "quoted and bracketed addresses",
    "draft2020-12/optional/format/ipv6": "IPv4 within IPv6",
    "draft2020-12/unevaluatedProperties": "annotations of an if without then",
    "draft7/ref": "keywords beside $ref are kept as well",
}
#: Formats whose grammar is too permissive: calendars, leap seconds, Punycode.
WIDE_FORMATS = ("date", "date-time", "time", "hostname")


Group = tuple[str, Any, list[tuple[Any, bool]]]


def _read(checkout: Path) -> dict[str, list[Group]]:
    """Return groups by file: description, schema, and instances with their validity."""
    suite: dict[str, list[Group]] = {}
    seen = set()
    for draft in ("draft2020-12", "draft7"):
        folder = checkout / "tests" / draft
        for path in sorted((*folder.glob("*.json"), *folder.glob("optional/format/*.json"))):
            groups = []
            for group in json.loads(path.read_text(encoding="utf-8")):
                schema, bare = group["schema"], group["schema"]
                if isinstance(schema, dict):
                    bare = {keyword: value for keyword, value in schema.items() if keyword != "$schema"}
                tests = [(test["data"], test["valid"]) for test in group["tests"]]
                if (key := json.dumps([bare, tests])) not in seen:
                    seen.add(key)
                    groups.append((group["description"], schema, tests))
            if groups:
                suite[str(path.relative_to(checkout / "tests").with_suffix(""))] = groups
    return suite


SUITE = _read(Path(CHECKOUT)) if CHECKOUT else {}


@pytest.fixture(scope="module")
def bytes_() -> ByteMatcher:
    return ByteMatcher()


def whole_floats(value: Any) -> bool:
    """Return whether `value` contains a float such as 1.0: an integer in JSON Schema, which grammars write as 1."""
    if isinstance(value, list):
        return any(map(whole_floats, value))
    return isinstance(value, float) and value.is_integer()


@pytest.mark.parametrize("file", SUITE)
def test_grammars_write_only_valid_instances(file: str, bytes_: ByteMatcher) -> None:
    for description, schema, instances in SUITE[file]:
        try:
            source = bytes_.compile(json=schema)
        except RequestError as error:
            refusals = REFUSALS if any(valid for _, valid in instances) else (*REFUSALS, *IMPOSSIBLE)
            assert error.message.startswith(refusals), f"{description}: {error.message}"
            assert error.param == "structured_outputs.json"
            continue
        for instance, valid in instances:
            written = any(bytes_.writes(source, instance, **style) for style in STYLES)
            where = f"{description}: {json.dumps(schema)}: {json.dumps(instance)}"
            if written and not valid:
                assert file.split("/optional/format/")[-1] in WIDE_FORMATS, where
            if valid and not written:
                assert file in UNWRITTEN or whole_floats(instance), where


def test_grammars_support_most_of_the_suite(bytes_: ByteMatcher) -> None:
    """The tests above would not notice keywords that are refused without need."""
    counts: Counter[bool] = Counter()
    for groups in SUITE.values():
        for _, schema, instances in groups:
            try:
                bytes_.compile(json=schema)
                counts[True] += len(instances)
            except RequestError:
                counts[False] += len(instances)
    assert counts[True] >= 1330, counts
