"""Shared fixtures of the runtimes' tests."""

from __future__ import annotations

import pytest

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.estimate import Estimate
from stoker_operator.plan.placement import Placement
from stoker_operator.plan.planner import Plan


def planned(
    spec: Spec, *, max_model_len: int | None = None, expert: bool = False, estimate: Estimate | None = None
) -> Plan:
    """Return a plan with the sizes of the spec, without checking whether they fit."""
    hardware, sizes = spec.hardware, spec.sizes
    accelerator = Catalogue.load().accelerator(hardware.accelerator)
    placement = Placement(
        accelerator, hardware.accelerators, 1, sizes.tensor, sizes.pipeline, sizes.data, expert=expert
    )
    return Plan(placement, spec.engine.image or "image", estimate, max_model_len=max_model_len)


@pytest.fixture
def gpu() -> dict[str, object]:
    """Return hardware with four accelerators."""
    return {"accelerator": "nvidia-l4", "count": 4}
