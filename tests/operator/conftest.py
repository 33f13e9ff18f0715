"""Shared fixtures of the operator's tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from stoker_operator.api.manifest import parse
from stoker_operator.api.v1alpha1 import InferenceEndpoint
from stoker_operator.plan.catalogue import Catalogue

Document = dict[str, Any]

MINIMAL: Document = {
    "apiVersion": "stoker.dev/v1alpha1",
    "kind": "InferenceEndpoint",
    "metadata": {"name": "demo", "namespace": "default"},
    "spec": {"model": {"source": "demo://gemma-3-270m"}, "hardware": {"accelerator": "cpu"}},
}


@pytest.fixture
def document() -> Callable[..., Document]:
    """Return a manifest with the given parts of its spec: ``document(replicas=2)``."""

    def make(**spec: Any) -> Document:
        made = copy.deepcopy(MINIMAL)
        made["spec"] |= spec
        return made

    return make


@pytest.fixture
def endpoint(document: Callable[..., Document]) -> Callable[..., InferenceEndpoint]:
    """Return a parsed endpoint, with the arguments of `document`."""
    return lambda **spec: parse(document(**spec))


@pytest.fixture
def catalogue() -> Catalogue:
    """The built-in catalogue."""
    return Catalogue.load()
