"""Types of fields that ask for something we do not do.

Clients send many of them at the value that asks for nothing (`n: 1`, `tools: []`), so that value and null are
accepted. Any other is refused, naming the field: an answer that silently leaves out what was asked for is
worse than none.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class OnlyValue:
    """Accepts null and the given values, which ask for nothing."""

    def __init__(self, *neutral: Any) -> None:
        self.neutral = neutral

    def check(self, value: Any) -> Any:
        """Refuses any other value."""
        if value is None or any(_same(value, neutral) for neutral in self.neutral):
            return value
        allowed = " or ".join(json.dumps(neutral) for neutral in (*self.neutral, None))
        raise PydanticCustomError("unsupported", "this server supports only {allowed} here", {"allowed": allowed})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Replaces the annotated type's own validation."""
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Describes to clients what is accepted."""
        return {"enum": [*self.neutral, None]}


class Renamed(OnlyValue):
    """Accepts null alone, and says what a field is called today."""

    def __init__(self, instead: str) -> None:
        super().__init__()
        self.instead = instead

    def check(self, value: Any) -> Any:
        """Refuses any value."""
        if value is not None:
            raise PydanticCustomError("unsupported", "this is an old name; use {instead}", {"instead": self.instead})
        return value


def _same(value: Any, neutral: Any) -> bool:
    """Equality, except that true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


Absent = Annotated[Any, OnlyValue()]
Off = Annotated[Any, OnlyValue(False)]
On = Annotated[Any, OnlyValue(True)]
Zero = Annotated[Any, OnlyValue(0)]
One = Annotated[Any, OnlyValue(1)]
NoList = Annotated[Any, OnlyValue([])]
NoDict = Annotated[Any, OnlyValue({})]
