"""Parses manifests, as YAML or as objects of the Kubernetes API, into InferenceEndpoints, or reports violations."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final

import yaml
from pydantic import BaseModel, ValidationError

from stoker_operator.api.rule import changes, violations
from stoker_operator.api.v1alpha1 import API_VERSION, KIND, InferenceEndpoint
from stoker_operator.api.violation import Refused, Violation

#: Maximum number of characters of a wrong value in a message.
_SHOWN: Final = 100
#: Fields that are reserved for later versions.
RESERVED: Final = ("spec.gateway", "spec.adapters", "spec.prefill")


def read(text: str) -> list[InferenceEndpoint]:
    """Return the endpoints in a YAML text of one or more documents.

    Raises:
        Refused: the text is not one or more valid endpoints in YAML.
    """
    return [parse(document) for document in documents(text)]


def documents(text: str) -> list[Any]:
    """Return the non-null documents in a YAML text; at least one.

    Raises:
        Refused: the text is not YAML, or has no such document.
    """
    try:
        found = [document for document in yaml.safe_load_all(text) if document is not None]
    # PyYAML does not catch Python's errors about invalid dates and numbers, and about too deep nesting.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Refused(Violation("manifest", f"the text is not YAML: {error}")) from None
    if not found:
        raise Refused(Violation("manifest", "the text is empty", f"write an {KIND}"))
    return found


def parse(document: Any, before: Any = None) -> InferenceEndpoint:
    """Return the endpoint that `document` describes.

    Args:
        document: the manifest.
        before: the previous manifest, for rules about changes. These rules are skipped if `before` is None or does not
            match the schema.

    Raises:
        Refused: the manifest violates the schema or a rule.
    """
    if not isinstance(document, Mapping):
        raise Refused(Violation("manifest", f"the document is {document!r}, not a mapping", f"write an {KIND}"))
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
    """Convert an error of pydantic to a violation."""
    field = ""
    for step in error["loc"]:
        field += f"[{step}]" if isinstance(step, int) else f".{step}" if field else str(step)
    if field in RESERVED:
        return Violation(field, "this field is reserved and not available yet", "remove it")
    if error["type"] == "extra_forbidden":
        names = _fields(error["loc"][:-1])
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
    return Violation(field, message + shown)


def _shown(value: Any) -> str:
    """Format `value` for a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _fields(path: tuple[Any, ...]) -> list[str]:
    """Return the field names of the object at `path`."""
    model: Any = InferenceEndpoint
    for step in path:
        if isinstance(step, int):
            continue
        field = next(field for field in model.model_fields.values() if field.alias == step)
        model = _model_in(field.annotation)
    return [field.alias for field in model.model_fields.values()]


def _model_in(annotation: Any) -> Any:
    """Return the model inside an annotation such as ``list[Model] | None``, or None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _model_in(inner)
        if found:
            return found
    return None
