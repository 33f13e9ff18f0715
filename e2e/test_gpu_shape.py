"""GPU endpoints on nodes that only advertise GPUs.

A TP × DP plan requests the right number on the right node, unschedulable pods are reported with the cause, and
impossible specs are refused on write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from kit.cluster import Cluster, Images, Object
from kit.endpoint import Endpoint, example
from kit.waiting import wait_for

GPU = "nvidia.com/gpu"
PRODUCT = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}


@pytest.fixture(scope="module")
def gpu_node(cluster: Cluster) -> Iterator[str]:
    """A node that advertises 8 GPUs: the last node, a worker if there is one."""
    node = cluster.get("nodes")["items"][-1]["metadata"]["name"]
    path = "/status/capacity/nvidia.com~1gpu"
    patch = ("patch", "node", node, "--subresource=status", "--type=json", "-p")
    cluster.kubectl(*patch, json.dumps([{"op": "add", "path": path, "value": "8"}]))
    labels = [f"{name}={value}" for name, value in PRODUCT.items()]
    cluster.kubectl("label", "node", node, *labels)
    wait_for(lambda: cluster.get("node", node)["status"]["allocatable"].get(GPU) == "8", "8 GPUs", 60)
    yield node
    cluster.kubectl("label", "node", node, *(f"{name}-" for name in PRODUCT))
    cluster.kubectl(*patch, json.dumps([{"op": "remove", "path": path}]))


def gpus(name: str, count: int, images: Images, **parallelism: int) -> Object:
    """Return examples/02-four-gpus.yaml with another size, and with an available image."""
    document = example("02-four-gpus.yaml")
    document["metadata"]["name"] = name
    spec = document["spec"]
    spec["replicas"] = 1
    spec["hardware"]["count"] = count
    spec["parallelism"] = parallelism
    spec["engine"] = {"image": images.engine, "maxModelLen": 4096}
    return document


@pytest.mark.timeout(600)
def test_pod_gets_the_planned_gpus(
    cluster: Cluster, images: Images, chart: None, gpu_node: str, namespace: str
) -> None:
    endpoint = Endpoint(cluster, namespace, "four")
    endpoint.apply(gpus("four", 4, images, tensor=2))
    pod = wait_for(lambda: next(iter(endpoint.pods()), None), "a pod", 60)
    pod = wait_for(lambda: next((each for each in endpoint.pods() if "nodeName" in each["spec"]), None), "a node", 60)
    assert pod["spec"]["nodeName"] == gpu_node
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"][GPU] == "4"
    assert {"--tensor-parallel-size=2", "--data-parallel-size=2"} <= set(container["args"])
    plan = wait_for(lambda: endpoint.get()["status"].get("workloads"), "a plan", 30)[0]["plan"]
    assert (plan["tensor"], plan["data"]) == (2, 2)

    # The status of a second endpoint names the one that occupies the GPUs.
    second = Endpoint(cluster, namespace, "eight")
    second.apply(gpus("eight", 8, images, tensor=2))
    condition = second.wait_reason("Unschedulable", timeout=90)
    assert GPU in condition["message"]
    assert f"{namespace}/four" in condition["message"]

    # Once the GPUs are free, its pod is scheduled.
    endpoint.delete()
    wait_for(lambda: any("nodeName" in pod["spec"] for pod in second.pods()), "eight GPUs", 120)


@pytest.mark.further
@pytest.mark.timeout(300)
def test_more_gpus_than_any_node_has_are_reported(
    cluster: Cluster, images: Images, chart: None, gpu_node: str, namespace: str
) -> None:
    endpoint = Endpoint(cluster, namespace, "sixteen")
    endpoint.apply(gpus("sixteen", 16, images, tensor=2))
    condition = endpoint.wait_reason("Unschedulable", timeout=90)
    assert "no node" in condition["message"] and "8" in condition["message"], condition


def test_wrong_shapes_are_refused_on_apply(cluster: Cluster, images: Images, chart: None, namespace: str) -> None:
    for parallelism, sentence in (
        ({"tensor": 3}, "tensor"),
        ({"tensor": 2, "data": 4}, "needs 8 GPUs"),
        ({"tensor": 1, "data": 2}, "idle"),
    ):
        answer = cluster.apply(namespace, gpus("wrong", 4, images, **parallelism), check=False)
        assert sentence in answer, answer
        assert not cluster.find("inferenceendpoint", "wrong", "--namespace", namespace)
