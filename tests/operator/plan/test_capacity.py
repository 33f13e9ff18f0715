"""Messages about the cluster's nodes."""

from __future__ import annotations

import pytest

from stoker_operator.objects.facts import Node
from stoker_operator.plan.capacity import Holder, capacity
from stoker_operator.plan.catalogue import Catalogue

GPU = "nvidia.com/gpu"
H100 = Catalogue.load().accelerator("nvidia-h100-80gb")
CPU = Catalogue.load().accelerator("cpu")


def node(name: str, gpus: int, product: str = "", *, ready: bool = True, cordoned: bool = False) -> Node:
    labels = {"nvidia.com/gpu.product": product} if product else {}
    return Node(name, labels, {GPU: gpus} if gpus else {}, ready, cordoned)


@pytest.mark.parametrize(
    ("nodes", "holders", "expected"),
    [
        ([], [], ""),
        ([node("a", 8)], [], ""),
        ([node("a", 0)], [], "no node can ever hold 8 × nvidia.com/gpu: none has any"),
        ([node("a", 4), node("b", 2)], [], "no node can ever hold 8 × nvidia.com/gpu: the largest has 4"),
        (
            [node("a", 8, "NVIDIA-A10G"), node("b", 0)],
            [],
            "no node can ever hold 8 × nvidia.com/gpu: the nodes that have it are labelled as another kind",
        ),
        (
            [node("a", 8, "NVIDIA-H100-80GB-HBM3-SHARED")],
            [],
            "no node can ever hold 8 × nvidia.com/gpu: the nodes that have it are time-sliced; append -shared to the "
            "accelerator's name to use a share",
        ),
        ([node("a", 8, "NVIDIA-H100-80GB-HBM3")], [], ""),
        (
            [node("a", 8), node("b", 4)],
            [Holder("ns/one", "a", {GPU: 1}), Holder("ns/two", "a", {GPU: 4}), Holder("ns/other", "b", {GPU: 4})],
            "not now: 3 of 8 free on a, held by ns/two (4), ns/one (1)",
        ),
        (
            [node("a", 8), node("b", 8)],
            [Holder("ns/one", "a", {GPU: 8}), Holder("ns/two", "b", {GPU: 2})],
            "not now: 6 of 8 free on b, held by ns/two (2)",
        ),
        ([node("a", 8), node("b", 8)], [Holder("ns/one", "a", {GPU: 8})], ""),
        ([node("a", 8, ready=False)], [], "not now: a (not ready) could hold 8 × nvidia.com/gpu"),
        ([node("a", 8, cordoned=True)], [], "not now: a (cordoned) could hold 8 × nvidia.com/gpu"),
        (
            [node("a", 8, cordoned=True), node("b", 8, ready=False, cordoned=True), node("c", 4)],
            [],
            "not now: a (cordoned), b (not ready) could hold 8 × nvidia.com/gpu",
        ),
        ([node("a", 8)], [Holder("ns/one", "a", {"cpu": 8})], ""),
    ],
)
def test_message_says_whether_pods_can_never_or_not_now_run(
    nodes: list[Node], holders: list[Holder], expected: str
) -> None:
    assert capacity(nodes, holders, H100, 8) == expected


def test_only_the_largest_of_many_holders_are_named() -> None:
    holders = [Holder(f"ns/{index}", "a", {GPU: 1}) for index in range(8)]
    reason = capacity([node("a", 8)], holders, H100, 2)
    assert reason == "not now: 0 of 8 free on a, held by " + ", ".join(f"ns/{i} (1)" for i in range(5)) + " and 3 more"


def test_only_some_of_many_closed_nodes_are_named() -> None:
    reason = capacity([node(f"n{index}", 8, cordoned=True) for index in range(8)], [], H100, 2)
    names = ", ".join(f"n{index} (cordoned)" for index in range(5))
    assert reason == f"not now: {names} and 3 more could hold 2 × nvidia.com/gpu"


def test_cpus_are_not_counted() -> None:
    assert capacity([node("a", 0)], [], CPU, 1) == ""
