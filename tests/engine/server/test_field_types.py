"""Types of the fields of request bodies: JSON's booleans are no numbers, although Python's are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from stoker_engine.server import app  # noqa: F401  (imports the bodies of all APIs)
from stoker_engine.server.fields.field_types import StrictModel


def _strict_models() -> list[type[StrictModel]]:
    """Return all models of request bodies and of their parts."""
    found, pending = list[type[StrictModel]](), [StrictModel]
    while pending:
        for model in pending.pop().__subclasses__():
            found.append(model)
            pending.append(model)
    return found


def _mistaken(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[Any]:
    """Yield booleans in place of numbers, and numbers in place of booleans, for a field's JSON Schema."""
    alternatives = [
        definitions.get(each.get("$ref", "").rpartition("/")[2], each) for each in schema.get("anyOf", [schema])
    ]
    values = [value for each in alternatives for value in each.get("enum", [])]
    takes_bool = any(each.get("type") == "boolean" for each in alternatives) or any(isinstance(v, bool) for v in values)
    takes_number = any(each.get("type") in ("integer", "number") for each in alternatives) or any(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    )
    if takes_number and not takes_bool:
        yield from (True, False)
    if takes_bool and not takes_number:
        yield from (1, 0, 1.0)
    for each in alternatives:
        if isinstance(items := each.get("items"), dict) and each.get("type") == "array":
            yield from ([value] for value in _mistaken(items, definitions))
        if isinstance(values_of := each.get("additionalProperties"), dict):
            yield from ({"5": value} for value in _mistaken(values_of, definitions))


def test_booleans_are_no_numbers_in_any_field_and_numbers_no_booleans() -> None:
    count = 0
    for model in _strict_models():
        schema = model.model_json_schema()
        for name, field in schema.get("properties", {}).items():
            for value in _mistaken(field, schema.get("$defs", {})):
                with pytest.raises(ValidationError) as refused:
                    model.model_validate({name: value})
                assert name in {error["loc"][0] for error in refused.value.errors() if error["loc"]}, (
                    model,
                    name,
                    value,
                )
                count += 1
    assert count > 200
