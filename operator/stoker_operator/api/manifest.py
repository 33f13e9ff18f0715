"""A manifest, as text or as an object of the API, → an InferenceEndpoint, or all that is wrong with it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final

import yaml
from pydantic import BaseModel, ValidationError

from stoker_operator.api.rule import changes, violations
from stoker_operator.api.v1alpha1 import API_VERSION, KIND, InferenceEndpoint
from stoker_operator.api.violation import Refused, Violation

#: How much of a wrong value is repeated.
_SHOWN: Final = 100
#: Fields that will have a meaning.
RESERVED: Final = ("spec.gateway", "spec.adapters", "spec.prefill")


def read(text: str) -> list[InferenceEndpoint]:
    """The endpoints in a YAML file of one or more documents.

    Raises:
        Refused: something in it is wrong.
    """
    return [parse(document) for document in documents(text)]


def documents(text: str) -> list[Any]:
    """The documents in a YAML file; at least one.

    Raises:
        Refused: it is not YAML, or it is empty.
    """
    try:
        found = [document for document in yaml.safe_load_all(text) if document is not None]
    # PyYAML lets pass what Python says of a date or a number that cannot be, and of nesting that is too deep.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Refused(Violation("manifest", f"this is not YAML: {error}")) from None
    if not found:
        raise Refused(Violation("manifest", "it is empty", f"write an {KIND}"))
    return found


def parse(document: Any, before: Any = None) -> InferenceEndpoint:
    """The endpoint that `document` describes.

    Args:
        document: the manifest.
        before: the manifest as it was, for rules about what may be changed; None where that is not known. One that
            cannot be read, since the rules were others then, forbids no change.

    Raises:
        Refused: it breaks the schema, or a rule.
    """
    if not isinstance(document, Mapping):
        raise Refused(Violation("manifest", f"it holds {document!r}", f"write an {KIND}"))
    if (document.get("apiVersion"), document.get("kind")) != (API_VERSION, KIND):
        stated_kind = f"{document.get('apiVersion')} {document.get('kind')}"
        raise Refused(Violation("kind", f"this is {stated_kind}, not {API_VERSION} {KIND}"))
    try:
        endpoint = InferenceEndpoint.model_validate(dict(document))
    except ValidationError as error:
        raise Refused(*(_violation(dict(item)) for item in error.errors())) from None
    broken = (*violations(endpoint), *_forbidden_changes(endpoint, before))
    if broken:
        raise Refused(*broken)
    return endpoint


def _forbidden_changes(endpoint: InferenceEndpoint, before: Any) -> tuple[Violation, ...]:
    if before is None:
        return ()
    try:
        was = InferenceEndpoint.model_validate(dict(before))
    except (ValidationError, TypeError, ValueError):
        return ()
    return tuple(changes(endpoint, was))


def _violation(error: dict[str, Any]) -> Violation:
    """What pydantic found, in our words."""
    field = ""
    for step in error["loc"]:
        field += f"[{step}]" if isinstance(step, int) else f".{step}" if field else str(step)
    if field in RESERVED:
        return Violation(field, "this field is reserved and not available yet", "remove it")
    if error["type"] == "extra_forbidden":
        names = _fields(error["loc"][:-1])
        close = difflib.get_close_matches(str(error["loc"][-1]), names, n=1)
        remedy = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
        return Violation(field, "there is no such field", remedy)
    if error["type"] == "missing":
        return Violation(field, "this field is required", "set it")
    if error["type"] in ("model_type", "dict_type"):  # pydantic's message would name Python's classes
        return Violation(field, f"input should be a mapping, not {_shown(error['input'])}")
    message = (error["msg"][0].lower() + error["msg"][1:]).replace(" after validation", "")
    value = error["input"]
    shown = f", not {_shown(value)}" if isinstance(value, str | int | float) else ""
    return Violation(field, message + shown)


def _shown(value: Any) -> str:
    """`value` in a sentence."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _fields(path: tuple[Any, ...]) -> list[str]:
    """The names of the fields there are at `path`."""
    model: Any = InferenceEndpoint
    for step in path:
        if isinstance(step, int):
            continue
        field = next(field for field in model.model_fields.values() if field.alias == step)
        model = _model_in(field.annotation)
    return [field.alias for field in model.model_fields.values()]


def _model_in(annotation: Any) -> Any:
    """The model somewhere inside ``list[Model] | None`` and the like."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _model_in(inner)
        if found:
            return found
    return None
