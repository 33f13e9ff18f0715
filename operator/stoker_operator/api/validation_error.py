"""Describes pydantic's validation errors as violations, in the words of a manifest's or catalogue's author."""

from __future__ import annotations

import difflib
import re
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel

from stoker_operator.api.violation import Violation

#: Maximum number of characters of a wrong value in a message.
_SHOWN: Final = 100
#: Type of an error → texts that YAML would read as a value of the required type if they were not quoted.
_QUOTED: Final = {
    "int_type": re.compile(r"[-+]?\d+"),
    "float_type": re.compile(r"[-+]?\d+(\.\d+)?"),
    "bool_type": re.compile(r"true|false"),
}


def violation_of(error: dict[str, Any], model: type[BaseModel], reserved: tuple[str, ...] = ()) -> Violation:
    """Convert an error of pydantic to a violation.

    Args:
        error: an item of `ValidationError.errors`.
        model: the class that was validated.
        reserved: paths of fields that are reserved for later versions.
    """
    field = ""
    for step in error["loc"]:
        field += f"[{step}]" if isinstance(step, int) else f".{step}" if field else str(step)
    if field in reserved:
        return Violation(field, "this field is reserved and not available yet", "remove it")
    if error["type"] == "extra_forbidden":
        names = _fields(model, error["loc"][:-1])
        close = difflib.get_close_matches(str(error["loc"][-1]), names, n=1)
        remedy = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(names)}"
        return Violation(field, "there is no such field", remedy)
    if error["type"] == "missing":
        return Violation(field, "this field is required", "set it")
    if error["type"] in ("model_type", "dict_type"):  # pydantic's message would name Python's classes
        return Violation(field, f"input should be a mapping, not {_shown(error['input'])}")
    message = (error["msg"][0].lower() + error["msg"][1:]).replace(" after validation", "")
    value = error["input"]
    shown = f", not {_shown(value)}" if isinstance(value, str | int | float) else ""
    unquoted = _QUOTED.get(error["type"])
    is_quoted = unquoted is not None and isinstance(value, str) and unquoted.fullmatch(value) is not None
    return Violation(field, message + shown, "remove the quotes" if is_quoted else "")


def _shown(value: Any) -> str:
    """Format `value` for a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _fields(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """Return the field names of the object at `path` in an object of `model`."""
    found: Any = model
    for step in path:
        if get_origin(found) is None:
            fields = found.model_fields.items()
            annotation = next(field.annotation for name, field in fields if _name(field, name) == step)
        else:
            annotation = get_args(found)[-1]  # the items of a list, or the values of a mapping
        found = _structure(annotation)
    return [_name(field, name) for name, field in found.model_fields.items()]


def _name(field: Any, name: str) -> str:
    return str(field.alias or name)


def _structure(annotation: Any) -> Any:
    """Return the model, or the annotation of a list or mapping, in one such as ``list[Model] | None``; None if there is
    none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (list, dict):
        return annotation
    return next(filter(None, map(_structure, get_args(annotation))), None)
