"""A manifest, as text or as an object of the API, → an InferenceEndpoint, or all that is wrong with it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from stoker_operator.api.rule import violations
from stoker_operator.api.v1alpha1 import API_VERSION, KIND, InferenceEndpoint
from stoker_operator.api.violation import Refused, Violation


def read(text: str) -> list[InferenceEndpoint]:
    """The endpoints in a YAML file of one or more documents.

    Raises:
        Refused: something in it is wrong.
    """
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise Refused(Violation("manifest", f"this is not YAML: {error}")) from None
    if not documents:
        raise Refused(Violation("manifest", "it is empty", f"write an {KIND}"))
    return [parse(document) for document in documents]


def parse(document: Any) -> InferenceEndpoint:
    """The endpoint that `document` describes.

    Raises:
        Refused: it breaks the schema, or a rule.
    """
    if not isinstance(document, Mapping):
        raise Refused(Violation("manifest", f"it holds {document!r}", f"write an {KIND}"))
    if (document.get("apiVersion"), document.get("kind")) != (API_VERSION, KIND):
        given = f"{document.get('apiVersion')} {document.get('kind')}"
        raise Refused(Violation("kind", f"this is {given}, not {API_VERSION} {KIND}"))
    try:
        endpoint = InferenceEndpoint.model_validate(dict(document))
    except ValidationError as error:
        raise Refused(*(_violation(dict(item)) for item in error.errors())) from None
    broken = tuple(violations(endpoint))
    if broken:
        raise Refused(*broken)
    return endpoint


def _violation(error: dict[str, Any]) -> Violation:
    """What pydantic found, in our words."""
    field = ""
    for step in error["loc"]:
        field += f"[{step}]" if isinstance(step, int) else f".{step}" if field else str(step)
    if error["type"] == "extra_forbidden":
        names = _fields(error["loc"][:-1])
        close = difflib.get_close_matches(str(error["loc"][-1]), names, n=1)
        remedy = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
        return Violation(field, "there is no such field", remedy)
    if error["type"] == "missing":
        return Violation(field, "this field is required", "set it")
    message = error["msg"][0].lower() + error["msg"][1:]
    value = error["input"]
    shown = f", not {value!r}" if isinstance(value, str | int | float) else ""
    return Violation(field, message + shown)


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
