"""Shared fixtures of the planner's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stoker_operator.api.manifest import parse
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.planner import Study, study

LLAMA_8B = "hf://meta-llama/Meta-Llama-3-8B-Instruct"
LLAMA_70B = "hf://meta-llama/Meta-Llama-3-70B-Instruct"
LLAMA_405B = "hf://meta-llama/Llama-3.1-405B-Instruct"
MISTRAL_7B = "hf://mistralai/Mistral-7B-Instruct-v0.3"


def document(
    source: str,
    accelerator: str,
    count: int | None = None,
    *,
    hardware: dict[str, Any] | None = None,
    parallelism: dict[str, int] | None = None,
    **engine: Any,
) -> dict[str, Any]:
    """Return a manifest for runtime vllm, unless `engine` says otherwise."""
    made: dict[str, Any] = {"accelerator": accelerator, **(hardware or {})}
    if count is not None:
        made["count"] = count
    spec = {"model": {"source": source}, "hardware": made, "engine": {"runtime": "vllm", **engine}}
    if parallelism:
        spec["parallelism"] = parallelism
    return {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "InferenceEndpoint",
        "metadata": {"name": "demo"},
        "spec": spec,
    }


@pytest.fixture
def spec() -> Callable[..., Spec]:
    """Return the parsed `document`."""
    return lambda *args, **parts: parse(document(*args, **parts)).spec


@pytest.fixture
def studied(spec: Callable[..., Spec]) -> Callable[..., Study]:
    """Return the study of a `document`."""
    return lambda *args, **parts: study(spec(*args, **parts), Catalogue.load())
