"""Parses manifests, as YAML or as objects of the Kubernetes API, into InferenceEndpoints, or reports violations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import yaml
from pydantic import ValidationError

from stoker_operator.api.rule import changes, violations
from stoker_operator.api.v1alpha1 import API_VERSION, KIND, InferenceEndpoint
from stoker_operator.api.validation_error import violation_of
from stoker_operator.api.violation import Refused, Violation

#: Fields that are reserved for later versions.
RESERVED: Final = ("spec.gateway", "spec.adapters", "spec.prefill")


def read(text: str) -> list[InferenceEndpoint]:
    """Return the endpoints in a YAML text of one or more documents.

    Raises:
        Refused: the text is not one or more valid endpoints in YAML.
    """
    return [parse(document) for document in documents(text)]


def documents(text: str, name: str = "manifest") -> list[Any]:
    """Return the non-null documents in a YAML text; at least one.

    Args:
        name: name of the text in errors.

    Raises:
        Refused: the text is not YAML, or has no such document.
    """
    try:
        found = [document for document in yaml.safe_load_all(text) if document is not None]
    # PyYAML does not catch Python's errors about invalid dates and numbers, and about too deep nesting.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).replace('in "<unicode string>", ', "at ")  # PyYAML's name of every text
        raise Refused(Violation(name, f"the text is not YAML: {reason}")) from None
    if not found:
        raise Refused(Violation(name, "the text is empty", f"write an {KIND}"))
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
        remedy = f"set apiVersion: {API_VERSION}" if document.get("kind") == KIND else f"write an {KIND}"
        raise Refused(Violation("kind", f"this is {stated_kind}, not {API_VERSION} {KIND}", remedy))
    try:
        endpoint = InferenceEndpoint.model_validate(dict(document))
    except ValidationError as error:
        raise Refused(*(violation_of(dict(item), InferenceEndpoint, RESERVED) for item in error.errors())) from None
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
