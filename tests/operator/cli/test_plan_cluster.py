"""``stoker plan --cluster``: existing and free accelerators, and which of them fit the model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker_operator.cli.plan import main
from stoker_operator.cluster import kube

LLAMA_8B = "meta-llama/Llama-3.1-8B-Instruct"
LLAMA_70B = "meta-llama/Llama-3.1-70B-Instruct"
GPU = "nvidia.com/gpu"
PRODUCT = "nvidia.com/gpu.product"


def node(name: str, devices: dict[str, int], labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": spec,
        "status": {
            "allocatable": {**{key: str(count) for key, count in devices.items()}, "cpu": "8"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def pod(name: str, where: str, phase: str = "Running", **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "ns", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {**({"nodeName": where} if where else {}), "containers": [], **spec},
        "status": {"phase": phase},
    }


def wants(count: int, **more: Any) -> dict[str, Any]:
    return {"name": "c", "resources": {"limits": {GPU: str(count)}}, **more}


H100S = [node(f"h100-{index}", {GPU: 8}, {PRODUCT: "NVIDIA-H100-80GB-HBM3"}) for index in range(3)]


class Cluster:
    """Responses to lists, as from `kube.Kube`."""

    def __init__(self, nodes: list[Any], pods: list[Any] | None) -> None:
        self.objects = {"Node": nodes, "Pod": pods}

    def list(self, kind: str, **_: Any) -> kube.Listing:
        found = self.objects[kind]
        if found is None:
            raise kube.KubeError(403, "pods is forbidden")
        return kube.Listing(found, "1")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Run the command on a cluster; return the exit code and the document."""

    def call(nodes: list[Any], pods: list[Any] | None, *words: str) -> tuple[int, Any]:
        monkeypatch.setattr(kube.Kube, "connect", lambda: Cluster(nodes, pods))
        code = main([*words, "--cluster", "--runtime", "vllm", "-o", "json"])
        return code, json.loads(capsys.readouterr().out)

    return call


def test_each_accelerator_kind_is_a_row(planned: Any) -> None:
    nodes = [
        *H100S,
        node("l4-0", {GPU: 1}, {PRODUCT: "NVIDIA-L4"}),
        node("l4-1", {GPU: 1}, {PRODUCT: "NVIDIA-L4"}),
        node("amd", {"amd.com/gpu": 8}, {"amd.com/gpu.device-id": "74a1"}),
        node("plain", {}),
    ]
    code, found = planned(nodes, [pod("one", "h100-0", containers=[wants(6)])], "--model", LLAMA_70B)
    assert code == 0
    rows = {row["accelerator"]: row for row in found["accelerators"]}
    assert list(rows) == ["nvidia-l4", "nvidia-h100-80gb", "amd-mi300x"]
    h100 = rows["nvidia-h100-80gb"]
    assert (h100["nodes"], h100["total"], h100["free"], h100["largestNode"]) == (3, 24, 18, 8)
    # Four concurrent requests of 131,072 tokens need eight GPUs; two of h100-0 are free.
    assert (h100["count"], h100["tensor"], h100["maxModelLen"], h100["podsNow"]) == (8, 8, 131072, 2)
    assert h100["maxConcurrency"] >= 4 and h100["verdict"] == "serves"
    assert (rows["amd-mi300x"]["count"], rows["amd-mi300x"]["podsNow"]) == (2, 4)
    assert rows["nvidia-l4"]["verdict"] == "no"
    assert "exceed" in rows["nvidia-l4"]["reason"]


def test_reason_for_a_verdict_below_serves_is_shown(planned: Any) -> None:
    _, found = planned([node("a", {GPU: 2}, {PRODUCT: "NVIDIA-H100-80GB-HBM3"})], [], "--model", LLAMA_70B)
    (row,) = found["accelerators"]
    assert (row["count"], row["verdict"]) == (2, "holds")
    assert row["reason"] == f"sequences are limited to {row['maxModelLen']:,} of 131,072 tokens"
    flags = ["--model", LLAMA_70B, "--max-model-len", "3000", "--min-concurrency", "4"]
    _, found = planned([node("a", {GPU: 2}, {PRODUCT: "NVIDIA-H100-80GB-HBM3"})], [], *flags)
    assert found["accelerators"][0]["verdict"] == "serves"


@pytest.mark.parametrize(
    ("live", "held"),
    [
        (pod("p", "a", containers=[wants(2), wants(1)]), 3),
        (pod("p", "a", "Pending", containers=[wants(2)]), 2),  # bound, not running yet
        (pod("p", "", "Pending", containers=[wants(2)]), 0),  # not bound to a node
        (pod("p", "a", "Succeeded", containers=[wants(2)]), 0),
        (pod("p", "a", "Failed", containers=[wants(2)]), 0),
        (pod("p", "a", initContainers=[wants(4)], containers=[wants(1)]), 4),
        (pod("p", "a", initContainers=[wants(1)], containers=[wants(2)]), 2),
        (pod("p", "a", initContainers=[wants(1, restartPolicy="Always")], containers=[wants(2)]), 3),
        # Sidecars keep running beside the containers that start after them.
        (pod("p", "a", initContainers=[wants(2, restartPolicy="Always"), wants(3)], containers=[wants(1)]), 5),
        (pod("p", "a", initContainers=[wants(3), wants(2, restartPolicy="Always")], containers=[wants(1)]), 3),
        (pod("p", "a", containers=[wants(1)], overhead={GPU: "1", "cpu": "100m"}), 2),
        (pod("p", "a", containers=[{"name": "c", "resources": {"requests": {GPU: 2}, "limits": {GPU: 2}}}]), 2),
        (pod("p", "a", containers=[{"name": "c", "resources": None}]), 0),
        ({**pod("p", "a", containers=[wants(1)]), "status": None}, 1),
    ],
)
def test_pods_are_counted_as_the_scheduler_does(planned: Any, live: Any, held: int) -> None:
    _, found = planned([node("a", {GPU: 8}, {PRODUCT: "NVIDIA-L4"})], [live], "--model", LLAMA_8B)
    assert found["accelerators"][0]["free"] == 8 - held


def test_unschedulable_nodes_have_no_free_accelerators(planned: Any) -> None:
    broken = node("b", {GPU: 8}, {PRODUCT: "NVIDIA-L4"})
    broken["status"]["conditions"][0]["status"] = "Unknown"
    nodes = [node("a", {GPU: 8}, {PRODUCT: "NVIDIA-L4"}, unschedulable=True), broken]
    _, found = planned(nodes, [], "--model", LLAMA_8B)
    (row,) = found["accelerators"]
    assert (row["total"], row["free"], row["podsNow"]) == (16, 0, 0)


def test_unknown_accelerator_kinds_are_explained(planned: Any) -> None:
    nodes = [node("a", {GPU: 8}), node("b", {GPU: 4}, {PRODUCT: "NVIDIA-NEW"}), node("c", {"habana.ai/gaudi": 8})]
    code, found = planned(nodes, [], "--model", LLAMA_8B)
    assert code == 2 and found["errors"][0]["field"] == "spec.hardware"
    reasons = {row["resource"]: row["reason"] for row in found["accelerators"]}
    assert reasons[GPU] == (
        "not in the accelerator catalogue: NVIDIA-NEW; nodes without the label nvidia.com/gpu.product: 1"
    )
    assert reasons["habana.ai/gaudi"].startswith("the kind is intel-gaudi2 or intel-gaudi3, and no label shows which")


def test_shared_gpus_and_tpu_topologies_are_read_from_labels(planned: Any) -> None:
    nodes = [
        node("shared", {GPU: 40}, {PRODUCT: "NVIDIA-L4-SHARED"}),
        node(
            "tpu",
            {"google.com/tpu": 8},
            {"cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice", "cloud.google.com/gke-tpu-topology": "2x4"},
        ),
    ]
    _, found = planned(nodes, [], "--model", "Qwen/Qwen3-0.6B", "--max-model-len", "4096")
    rows = {row["accelerator"]: row for row in found["accelerators"]}
    assert rows["nvidia-l4-shared"]["count"] == 1
    assert rows["google-tpu-v6e"]["count"] == 8  # chips of the topology


def test_free_accelerators_are_unknown_without_permission_to_list_pods(planned: Any) -> None:
    code, found = planned(H100S, None, "--model", LLAMA_8B)
    assert code == 0
    assert (found["accelerators"][0]["free"], found["accelerators"][0]["podsNow"]) == (None, None)
    assert "pods is forbidden" in found["cluster"]


def test_named_accelerator_shows_its_layouts_and_the_table(planned: Any) -> None:
    pods = [pod("other", "h100-0", containers=[wants(7)])]
    words = ["--model", LLAMA_8B, "--accelerator", "nvidia-h100-80gb", "--count", "2"]
    _, found = planned(H100S[:1], pods, *words)
    assert found["cluster"] == "not now: 1 of 8 free on h100-0, held by ns/other (7)"
    assert len(found["options"]) == 2
    assert [row["accelerator"] for row in found["accelerators"]] == ["nvidia-h100-80gb"]


def test_table_lists_the_clusters_accelerators(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(kube.Kube, "connect", lambda: Cluster(H100S, []))
    assert main(["--model", LLAMA_8B, "--cluster", "--runtime", "vllm"]) == 0
    titles, row = capsys.readouterr().out.strip().splitlines()
    assert titles.split("  ")[0] == "accelerator"
    assert row.split()[:6] == ["nvidia-h100-80gb", "3", "24", "24", "8", "2"]
    assert "serves" in row


def test_missing_cluster_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    assert main(["--model", LLAMA_8B, "--cluster"]) == 2
    assert "stoker plan: cluster: no cluster" in capsys.readouterr().err


def test_cluster_without_accelerators_is_reported(planned: Any) -> None:
    code, found = planned([node("a", {})], [], "--model", LLAMA_8B)
    assert code == 2
    assert found["errors"][0]["message"] == "no node has an accelerator of the catalogue"
