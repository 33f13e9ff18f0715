"""Types of fields for unsupported features.

Clients often send such fields with their neutral value (`n: 1`, `tools: []`), so they are accepted with that value or
null. Other values are refused with an error that names the field: ignoring them silently would be worse.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class OnlyValue:
    """Accepts null and the given neutral values."""

    def __init__(self, *neutral: Any) -> None:
        self.neutral = neutral

    def check(self, value: Any) -> Any:
        """Refuse all other values."""
        if value is None or any(_same(value, neutral) for neutral in self.neutral):
            return value
        allowed = " or ".join(json.dumps(neutral) for neutral in (*self.neutral, None))
        raise PydanticCustomError("unsupported", "this server supports only {allowed} here", {"allowed": allowed})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Replace the validation of the annotated type."""
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Describe the accepted values in the OpenAPI schema."""
        return {"enum": [*self.neutral, None]}


class Renamed(OnlyValue):
    """Accepts only null; the error names the field that replaces this one."""

    def __init__(self, instead: str) -> None:
        super().__init__()
        self.instead = instead

    def check(self, value: Any) -> Any:
        """Refuse any value except null."""
        if value is not None:
            raise PydanticCustomError("unsupported", "this field is obsolete; use {instead}", {"instead": self.instead})
        return value


def _same(value: Any, neutral: Any) -> bool:
    """Return whether the values are equal; true is not equal to 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


Absent = Annotated[Any, OnlyValue()]
Off = Annotated[Any, OnlyValue(False)]
On = Annotated[Any, OnlyValue(True)]
Zero = Annotated[Any, OnlyValue(0)]
NoList = Annotated[Any, OnlyValue([])]
NoDict = Annotated[Any, OnlyValue({})]
