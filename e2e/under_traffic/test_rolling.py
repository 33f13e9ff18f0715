"""Changes under continuous traffic: no failed requests and no cut streams.

There are two replicas; streams are shorter than `drainSeconds`; clients do not retry. Asserted for each of: another
flag, another maxModelLen, another image, more and fewer replicas, a drained node (respecting the PodDisruptionBudget),
and a chart upgrade with a newer engine image and an operator that renders pods differently, which restarts no pod until
the spec requires it.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kit import chart as release
from kit.cluster import Cluster, Images
from kit.endpoint import Endpoint
from kit.results import Results
from kit.traffic import Flow, traffic
from kit.waiting import wait_for

Disturbed = Callable[[str, Callable[[Flow], None]], None]


@pytest.fixture
def undisturbed(endpoint: Endpoint, images: Images, results: Results, namespace: str) -> Disturbed:
    """``undisturbed(scenario, change)`` makes a change under traffic, and asserts that no request is affected."""

    def run(scenario: str, change: Callable[[Flow], None]) -> None:
        url = endpoint.wait_ready()["url"]
        with traffic(endpoint.cluster, endpoint.namespace, images.client, url) as flow:
            began = time.monotonic()
            change(flow)
            recovery = time.monotonic() - began
            flow.wait_for(10)
        results.add(scenario, flow.result, recovery)
        flow.result.unbroken()

    return run


def rolled_out(endpoint: Endpoint, before: set[str], replicas: int = 2) -> None:
    """Wait until all pods are new, and the old ones are gone."""
    endpoint.wait_ready(420)
    assert len(endpoint.lives()) == replicas
    assert not before & set(endpoint.lives())
    ended(endpoint, replicas)


def ended(endpoint: Endpoint, replicas: int) -> None:
    """Wait until terminating pods have ended, so that their drain was under traffic too."""
    selector = ("-l", "app.kubernetes.io/instance=demo", "--namespace", endpoint.namespace)
    wait_for(lambda: len(endpoint.cluster.get("pods", *selector)["items"]) == replicas, "old pods have ended", 90)


@pytest.mark.further
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("change_name", "engine", "argument"),
    [
        ("a flag", {"maxNumSeqs": 8}, "--max-num-seqs=8"),
        # Longer, not shorter: prompts have up to the length that the first pods accept.
        ("maxModelLen", {"maxModelLen": 2304}, "--max-model-len=2304"),
    ],
)
def test_rolling_update_of_a_setting(
    endpoint: Endpoint, undisturbed: Disturbed, change_name: str, engine: dict, argument: str
) -> None:  # type: ignore[type-arg]
    def change(flow: Flow) -> None:
        before = set(endpoint.lives())
        endpoint.patch(engine=engine)
        rolled_out(endpoint, before)
        assert all(argument in pod["spec"]["containers"][0]["args"] for pod in endpoint.pods())

    undisturbed(f"rolling update: {change_name}", change)


@pytest.mark.further
@pytest.mark.timeout(900)
def test_rolling_update_of_the_image(
    cluster: Cluster, images: Images, endpoint: Endpoint, undisturbed: Disturbed
) -> None:
    other_image = f"{images.engine}-other"
    cluster.tag(images.engine, other_image)

    def change(flow: Flow) -> None:
        before = set(endpoint.lives())
        endpoint.patch(engine={"image": other_image})
        rolled_out(endpoint, before)
        assert endpoint.get()["status"]["workloads"][0]["image"] == other_image

    undisturbed("rolling update: image", change)


@pytest.mark.further
@pytest.mark.timeout(900)
def test_scaling_up_and_down(endpoint: Endpoint, undisturbed: Disturbed) -> None:
    def change(flow: Flow) -> None:
        before = set(endpoint.lives())
        endpoint.cluster.kubectl("scale", "ie/demo", "--replicas=3", "--namespace", endpoint.namespace)
        endpoint.wait_ready()
        wait_for(lambda: len(endpoint.serving()) == 3, "three serve", 60)
        assert before < set(endpoint.lives())
        endpoint.cluster.kubectl("scale", "ie/demo", "--replicas=2", "--namespace", endpoint.namespace)
        endpoint.wait_ready()
        ended(endpoint, 2)
        wait_for(lambda: len(endpoint.serving()) == 2, "two serve", 60)

    undisturbed("scale up and down", change)


@pytest.mark.further
@pytest.mark.timeout(900)
def test_node_drain(cluster: Cluster, endpoint: Endpoint, undisturbed: Disturbed) -> None:
    node = endpoint.pods()[0]["spec"]["nodeName"]
    budget = cluster.get("poddisruptionbudget", "demo", "--namespace", endpoint.namespace)
    assert budget["spec"]["maxUnavailable"] == 1
    least: list[int] = []

    def change(flow: Flow) -> None:
        drain = subprocess.Popen(
            ["kubectl", "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s", "--force"],
            env=os.environ | cluster.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        while drain.poll() is None:
            least.append(len(endpoint.serving()))
            time.sleep(1)  # sleeps: sampling interval
        assert drain.returncode == 0, drain.stdout.read() if drain.stdout else ""
        endpoint.wait_ready()
        assert node not in {pod["spec"]["nodeName"] for pod in endpoint.pods()}

    try:
        undisturbed("node drain", change)
    finally:
        cluster.kubectl("uncordon", node)
    assert min(least) >= 1


@pytest.fixture
def next_release(cluster: Cluster, images: Images, tmp_path: Path) -> Iterator[Images]:
    """Images of a next release: the engine's under another name, and an operator that renders pods differently."""
    if "E2E_KUBECONFIG" in os.environ:
        pytest.skip("needs a kind cluster with access to its nodes")
    later = Images(f"{images.operator}-next", f"{images.engine}-next", images.gateway, images.client)
    cluster.tag(images.engine, later.engine)
    subprocess.run(
        [release.CHART.parents[1] / "e2e/cluster/build-next-operator", images.operator, later.operator], check=True
    )
    yield later
    release.install(cluster, images)


@pytest.mark.timeout(1200)
def test_helm_upgrade(cluster: Cluster, endpoint: Endpoint, undisturbed: Disturbed, next_release: Images) -> None:
    endpoint.patch(engine={"image": None})  # back to the catalogue's image
    endpoint.wait_ready(420)
    ended(endpoint, 2)
    before = endpoint.lives()

    def upgrade(flow: Flow) -> None:
        release.install(cluster, next_release)
        condition = endpoint.wait_reason("NewerImageWaiting", kind="Progressing", timeout=120)
        assert next_release.engine in condition["message"]
        assert endpoint.ready()
        flow.wait_for(20)
        assert endpoint.lives() == before

    undisturbed("helm upgrade: newer image, other pods", upgrade)

    def ask(flow: Flow) -> None:
        endpoint.patch(rollout={"imageUpdates": "Always"})
        wait_for(lambda: endpoint.get()["status"]["workloads"][0]["image"] == next_release.engine, "the new image", 60)
        rolled_out(endpoint, set(before))
        (grace,) = {pod["spec"]["terminationGracePeriodSeconds"] for pod in endpoint.pods()}
        assert grace == 31  # the next operator adds one second

    undisturbed("the newer image, requested", ask)
