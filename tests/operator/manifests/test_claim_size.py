"""Changes of the size that a claim requests: Kubernetes' rules for claims with and without a failed expansion."""

from __future__ import annotations

from typing import Any

import pytest

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.manifests.storage import shrinking_problem


def spec_of(size: str) -> Spec:
    template = {"spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}}}
    return Spec.model_validate(
        {
            "model": {"source": "hf://org/model"},
            "hardware": {"accelerator": "cpu"},
            "storage": {"cache": {"volumeClaimTemplate": template}},
        }
    )


def claim(requested: str, capacity: str | None) -> dict[str, Any]:
    status = {"capacity": {"storage": capacity}} if capacity else {"phase": "Pending"}
    return {"spec": {"resources": {"requests": {"storage": requested}}}, "status": status}


@pytest.mark.parametrize(
    ("size", "requested", "capacity", "is_refused"),
    [
        ("10Gi", "10Gi", "10Gi", False),
        ("10240Mi", "10Gi", "10Gi", False),
        ("9Gi", "10Gi", "10Gi", True),
        ("11Gi", "10Gi", "10Gi", False),
        ("8Gi", "8Gi", "10Gi", False),  # the volume is larger than requested
        ("9Gi", "8Gi", "10Gi", False),
        ("7Gi", "8Gi", "10Gi", True),
        ("15Gi", "20Gi", "10Gi", False),  # the expansion failed
        ("10Gi", "20Gi", "10Gi", True),
        ("9Gi", "20Gi", "10Gi", True),
        ("1Gi", "10Gi", None, False),  # there is no volume yet
    ],
)
def test_claim_size_may_be_lowered_only_after_a_failed_expansion(
    size: str, requested: str, capacity: str | None, is_refused: bool
) -> None:
    problem = shrinking_problem(spec_of(size), claim(requested, capacity))
    assert (problem is not None) == is_refused
    if problem is not None:
        assert problem.field == "spec.storage.cache.volumeClaimTemplate.spec.resources.requests"
        proposed = problem.remedy.rpartition(" ")[2]
        smallest = proposed if problem.remedy.startswith("request at least") else f"{int(proposed[:-2]) + 1}Gi"
        assert shrinking_problem(spec_of(smallest), claim(requested, capacity)) is None


def test_missing_claim_does_not_shrink() -> None:
    assert shrinking_problem(spec_of("1Gi"), None) is None
