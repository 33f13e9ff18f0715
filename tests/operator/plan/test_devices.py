"""MIG slices, shared GPUs and slice profiles get the same verdict from all callers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.objects.owner import Owner
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.planner import plan
from stoker_operator.reconcile.evaluate import PlanningContext, evaluate

from .conftest import LLAMA_8B, document

QWEN_8B = "hf://Qwen/Qwen3-8B"
TOPOLOGY = "cloud.google.com/gke-tpu-topology"

SpecOf = Callable[..., Spec]


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    file = tmp_path / "catalogue.yaml"
    file.write_text(
        "accelerators:\n"
        "  mig-3g: {memoryMiB: 40320, resource: nvidia.com/mig-3g.40gb, arch: sm_90, images: cuda}\n"
        "  mig-single: {memoryMiB: 40320, resource: nvidia.com/gpu, arch: sm_90, images: cuda,\n"
        "    nodeLabels: {nvidia.com/gpu.product: [NVIDIA-H100-80GB-HBM3-MIG-3g.40gb]}}\n"
    )
    return Catalogue.load(file)


def against(catalogue: Catalogue, manifest: dict[str, Any]) -> tuple[Violation, ...]:
    """Return the violations that admission and reconcile report."""
    return evaluate(Owner("demo", "default", "uid"), manifest, PlanningContext(catalogue)).violations


@pytest.mark.parametrize("key", ["mig-3g", "mig-single", "nvidia-h100-80gb-shared"])
@pytest.mark.parametrize("parallelism", [None, {"tensor": 1}, {"pipeline": 2}, {"mode": "Auto"}])
@pytest.mark.parametrize("source", [LLAMA_8B, "pvc://models/mine"])
def test_several_device_slices_in_a_pod_are_refused(
    catalogue: Catalogue, key: str, parallelism: Any, source: str
) -> None:
    (violation,) = against(catalogue, document(source, key, 2, parallelism=parallelism))
    assert (violation.field, violation.reason) == ("spec.hardware.count", "NotTogether")
    assert violation.remedy.startswith("use hardware.count 1 with tensor 1, data 1, and more replicas")
    assert not against(catalogue, document(source, key, 1))


def test_model_too_large_for_a_slice_is_refused(catalogue: Catalogue) -> None:
    (violation,) = against(catalogue, document("hf://meta-llama/Llama-3.1-70B", "mig-3g", 4))
    assert "use accelerators with more memory" in violation.remedy


def test_shared_gpu_has_its_label_and_a_warning(spec: SpecOf) -> None:
    catalogue = Catalogue.load()
    shared = catalogue.accelerator("nvidia-t4-shared")
    assert shared.node_labels == {"nvidia.com/gpu.product": ["Tesla-T4-SHARED"]}
    assert catalogue.accelerator("nvidia-t4").node_labels == {"nvidia.com/gpu.product": ["Tesla-T4"]}
    with pytest.raises(Refused, match="amd-mi300x-shared is not in the accelerator catalogue"):
        catalogue.accelerator("amd-mi300x-shared")
    small = "hf://Qwen/Qwen3-0.6B"
    (warning,) = plan(spec(small, "nvidia-l4-shared", 1, maxModelLen=4096), catalogue).warnings
    assert "gpuMemoryUtilizationPercent" in warning
    tested_spec = spec(small, "nvidia-l4-shared", 1, maxModelLen=4096, gpuMemoryUtilizationPercent=40)
    assert not plan(tested_spec, catalogue).warnings


def with_topology(count: int, **pod: Any) -> dict[str, Any]:
    made = document(QWEN_8B, "google-tpu-v5e", count)
    made["spec"]["template"] = {"spec": pod}
    return made


def affinity(value: str) -> dict[str, Any]:
    terms = [{"matchExpressions": [{"key": TOPOLOGY, "operator": "In", "values": [value]}]}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def test_tpu_pod_requires_a_matching_topology() -> None:
    catalogue = Catalogue.load()
    (violation,) = against(catalogue, document(QWEN_8B, "google-tpu-v5e", 8))
    assert violation.reason == "TopologyMissing"
    assert violation.field == f"spec.template.spec.nodeSelector[{TOPOLOGY}]"
    assert violation.remedy == "set it to your node pool's topology, of 8 chips: 2x4"
    assert not against(catalogue, with_topology(8, nodeSelector={TOPOLOGY: "2x4"}))
    assert not against(catalogue, with_topology(8, affinity=affinity("2x4")))
    (violation,) = against(catalogue, with_topology(4, nodeSelector={TOPOLOGY: "2x4"}))
    assert violation.reason == "TopologyMismatch"


@pytest.mark.parametrize("pod", [{"nodeSelector": 3}, {"affinity": []}, {"nodeSelector": {TOPOLOGY: 8}}])
def test_malformed_template_states_no_topology(pod: dict[str, Any]) -> None:
    found = against(Catalogue.load(), with_topology(8, **pod))
    assert "TopologyMissing" in {violation.reason for violation in found}


@pytest.mark.parametrize("topology", ["", "2", "x", "2xx4", "9" * 5000, "2x4x8x1", "0x8"])
def test_malformed_topology_is_refused(topology: str) -> None:
    found = against(Catalogue.load(), with_topology(8, nodeSelector={TOPOLOGY: topology}))
    assert {violation.reason for violation in found} <= {"TopologyMissing", "TopologyMismatch"}
    assert found
