"""Ranks share a pod's CPUs and its memory, in equal parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stoker_common.errors import ArgumentError
from stoker_engine.contract.engine_args import ENGINES_SHARE_NO_EXPERTS, EngineArgs
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.planner import Study, Unplannable, plan

QWEN = "hf://Qwen/Qwen3-8B"
MIXTURE = "hf://Qwen/Qwen3-30B-A3B"
SpecOf = Callable[..., Spec]


def pod(memory: str, **more: Any) -> dict[str, Any]:
    return {"resources": {"limits": {"memory": memory, **more}}}


def refused(spec: Spec) -> Any:
    with pytest.raises(Unplannable) as caught:
        plan(spec, Catalogue.load())
    (violation,) = caught.value.violations
    return violation


@pytest.mark.parametrize(
    ("parallelism", "sizes"),
    [
        (None, (1, 1, 1)),
        ({}, (1, 1, 1)),
        ({"mode": "Auto"}, (1, 1, 1)),
        ({"minConcurrency": 2}, (1, 1, 1)),
        ({"tensor": 2}, (2, 1, 1)),
        ({"data": 3}, (1, 1, 3)),
        ({"pipeline": 2, "data": 2}, (1, 2, 2)),
    ],
)
def test_missing_sizes_default_to_one(spec: SpecOf, parallelism: Any, sizes: tuple[int, int, int]) -> None:
    planned = plan(spec(QWEN, "cpu", hardware=pod("96Gi"), parallelism=parallelism, runtime="stoker"), Catalogue.load())
    assert (planned.placement.sizes, planned.placement.count, planned.placement.idle) == (sizes, 1, 0)


def test_each_rank_has_an_equal_part_of_the_memory(spec: SpecOf) -> None:
    """Each of two ranks in 64 GiB has as much room as the single rank of a 32 GiB pod with the same shard."""
    engines = {"data": 2}
    two = plan(
        spec(QWEN, "cpu", hardware=pod("64Gi"), parallelism=engines, runtime="stoker"), Catalogue.load()
    ).estimate
    one = plan(spec(QWEN, "cpu", hardware=pod("32Gi"), runtime="stoker"), Catalogue.load()).estimate
    assert two is not None and two == one
    split = plan(spec(QWEN, "cpu", hardware=pod("64Gi"), parallelism={"tensor": 2}, runtime="stoker"), Catalogue.load())
    assert split.estimate is not None
    assert split.estimate.weight_bytes_per_gpu < 0.6 * two.weight_bytes_per_gpu


def test_refusal_names_the_memory_that_suffices(spec: SpecOf) -> None:
    """The memory in the remedy of a refused spec suffices."""
    parts: dict[str, Any] = {"parallelism": {"data": 4}, "runtime": "stoker"}
    violation = refused(spec(QWEN, "cpu", hardware=pod("8Gi"), **parts))
    assert violation.reason == "DoesNotFit"
    assert "a rank's share (1 of 4) of the container's memory" in violation.message
    assert violation.field == "spec.hardware.resources.limits.memory"
    needed = violation.remedy.split("limits.memory to ")[1].split(" ")[0]
    assert plan(spec(QWEN, "cpu", hardware=pod(needed), **parts), Catalogue.load())


def test_split_is_recommended_if_separate_engines_do_not_fit(spec: SpecOf) -> None:
    violation = refused(spec(QWEN, "cpu", hardware=pod("32Gi"), parallelism={"data": 4}, runtime="stoker"))
    assert violation.remedy.startswith("use tensor 4, data 1 (recommended)")


@pytest.mark.parametrize(("cpus", "warned"), [("2", True), ("3500m", True), ("4", False), (None, False)])
def test_more_ranks_than_cpus_cause_a_warning(spec: SpecOf, cpus: str | None, warned: bool) -> None:
    limits = {} if cpus is None else {"cpu": cpus}
    parts: dict[str, Any] = {"parallelism": {"tensor": 2, "data": 2}, "runtime": "stoker"}
    planned = plan(spec(QWEN, "cpu", hardware=pod("96Gi", **limits), **parts), Catalogue.load())
    assert any("4 ranks share" in each and "limits.cpu to 4" in each for each in planned.warnings) == warned


def test_engines_on_a_cpu_are_not_recommended_as_pods(spec: SpecOf, studied: Callable[..., Study]) -> None:
    """CPUs have no count: the recommendation can be written in a spec."""
    found = studied(QWEN, "cpu", hardware=pod("96Gi"), parallelism={"data": 2, "tensor": 2}, runtime="stoker")
    assert found.advice is not None
    assert (found.advice.count, found.advice.nodes, found.advice.sizes.used) == (1, 1, 4)


@pytest.mark.parametrize("accelerator", ["cpu", "nvidia-h100-80gb"])
@pytest.mark.parametrize("source", [MIXTURE, "pvc://models/mine"])
def test_data_parallel_engines_share_no_experts(spec: SpecOf, accelerator: str, source: str) -> None:
    """The planner and the engine give the same message."""
    hardware = pod("400Gi") if accelerator == "cpu" else {"count": 4}
    parts: dict[str, Any] = {"hardware": hardware, "runtime": "stoker", "image": "mine:1"}
    for expert in (2, 4):
        sizes = {"tensor": 2, "data": 2, "expert": expert}
        violation = refused(spec(source, accelerator, parallelism=sizes, **parts))
        assert (violation.field, violation.reason) == ("spec.parallelism.expert", "ExpertsNotShared")
        assert violation.message == ENGINES_SHARE_NO_EXPERTS
        assert "data 1 with expert 2" in violation.remedy
    with pytest.raises(ArgumentError, match=ENGINES_SHARE_NO_EXPERTS):
        EngineArgs("m", tensor_parallel_size=2, data_parallel_size=2, enable_expert_parallel=True)


def test_experts_are_distributed_within_an_engine(spec: SpecOf) -> None:
    """Whole experts have the size of their columns if both divide; vLLM's engines also share them."""
    h100 = "nvidia-h100-80gb"
    dealt = {"tensor": 4, "expert": 4}
    stoker_plan = plan(spec(MIXTURE, h100, 4, parallelism=dealt, runtime="stoker", image="mine:1"), Catalogue.load())
    split = plan(spec(MIXTURE, h100, 4, parallelism={"tensor": 4}, runtime="stoker", image="mine:1"), Catalogue.load())
    assert stoker_plan.placement.expert and stoker_plan.estimate is not None and split.estimate is not None
    assert stoker_plan.estimate.weight_bytes_per_gpu == split.estimate.weight_bytes_per_gpu
    assert not any("refuses to start" in warning for warning in stoker_plan.warnings)


def test_several_nodes_are_refused_for_runtime_stoker(spec: SpecOf) -> None:
    sizes = {"tensor": 8, "pipeline": 2}
    tested_spec = spec(
        QWEN, "nvidia-h100-80gb", 8, hardware={"nodes": 2}, parallelism=sizes, runtime="stoker", image="m:1"
    )
    with pytest.raises(Unplannable) as caught:
        plan(tested_spec, Catalogue.load())
    assert any(each.field == "spec.hardware.nodes" and "stoker" in each.message for each in caught.value.violations)
