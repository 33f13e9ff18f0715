"""The status is true: each fault is reported within seconds, and disappears once fixed.

Asserted for each fault: the Ready condition's reason and required parts of its message; an Event with that reason on
the endpoint; after the fix, the endpoint becomes ready. A fault never affects serving pods: a rollout of pods that
cannot start keeps the old ones, and a revert ends it.

Real: the engine, its download from a fake hub in the cluster, the kubelet, the scheduler, the quota.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from kit import hub as hubs
from kit.cluster import Cluster, Images, Object
from kit.endpoint import Endpoint
from kit.results import Results
from kit.tiny import tiny, tiny_llama
from kit.waiting import wait_for

_TOKEN = "hf_the-right-one"
#: Time until ready in seconds. A tiny model loads fast; starting the image and importing torch take longest.
_READY_S = 240
_RESTRICTED: Object = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tiny Llama."""
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def hub_namespace(cluster: Cluster) -> Iterator[str]:
    """The namespace of the hubs."""
    name = f"hubs-{uuid.uuid4().hex[:6]}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="module")
def hub(cluster: Cluster, images: Images, hub_namespace: str, model: dict[str, bytes]) -> str:
    """URL of a hub that every client may read."""
    return hubs.start(cluster, hub_namespace, images.client, model).url


@pytest.fixture(scope="module")
def private_hub(cluster: Cluster, images: Images, hub_namespace: str, model: dict[str, bytes]) -> str:
    """URL of a hub that requires a token."""
    return hubs.start(cluster, hub_namespace, images.client, model, _TOKEN).url


class ReportedCondition(NamedTuple):
    """A reported condition, with the seconds until its report."""

    condition: Object
    seconds: float


def wait_reported(endpoint: Endpoint, reason: str, *says: str, timeout: float) -> ReportedCondition:
    """Wait for the reason; assert parts of the message, and the Event."""
    began = time.monotonic()
    condition = endpoint.wait_reason(reason, timeout=timeout)
    seconds = time.monotonic() - began
    for words in says:
        assert words in condition["message"], condition["message"]
    wait_for(lambda: reason in event_reasons(endpoint), f"an Event {reason}; {event_reasons(endpoint)}", 20)
    return ReportedCondition(condition, seconds)


def event_reasons(endpoint: Endpoint) -> set[str]:
    """Return the reasons of the Events on the endpoint itself."""
    selector = f"involvedObject.kind=InferenceEndpoint,involvedObject.name={endpoint.name}"
    items = endpoint.cluster.get("events", "--namespace", endpoint.namespace, "--field-selector", selector)["items"]
    return {each["reason"] for each in items}


def fixed(endpoint: Endpoint, reason: str) -> None:
    """Assert that it becomes ready, and that the reason is gone."""
    conditions = {each["type"]: each for each in endpoint.wait_ready(_READY_S)["conditions"]}
    assert conditions["Stalled"]["status"] == conditions["Progressing"]["status"] == "False"
    assert reason not in {each["reason"] for each in conditions.values()}


@pytest.fixture
def endpoint(cluster: Cluster, chart: None, namespace: str) -> Endpoint:
    """An endpoint that is not created yet."""
    return Endpoint(cluster, namespace)


Note = Callable[[str, ReportedCondition], None]


@pytest.fixture
def note(results: Results) -> Note:
    """Add the time until the report to the table of results."""

    def write(fault: str, reported: ReportedCondition) -> None:
        results.add(f"status: {fault} reported as {reported.condition['reason']}", recovery=reported.seconds)

    return write


def test_bad_image(endpoint: Endpoint, hub: str, note: Note) -> None:
    document = tiny(hub)
    document["spec"]["engine"]["image"] = "stoker/no-such-image:1"
    endpoint.apply(document)
    note(
        "bad image",
        wait_reported(endpoint, "ImagePullError", "stoker/no-such-image:1", "spec.engine.image", timeout=60),
    )
    endpoint.patch(engine={"image": None})
    fixed(endpoint, "ImagePullError")


def test_missing_model(endpoint: Endpoint, hub: str, note: Note) -> None:
    endpoint.apply(tiny(hub, source="hf://org/nothing"))
    note("missing model", wait_reported(endpoint, "ModelNotFound", "org/nothing", "spec.model.source", timeout=90))
    assert endpoint.condition("Stalled")["status"] == "True", "waiting does not help"
    endpoint.patch(model={"source": "hf://org/model"})
    fixed(endpoint, "ModelNotFound")


@pytest.mark.further
def test_bad_token(endpoint: Endpoint, private_hub: str, note: Note) -> None:
    """The Secret is corrected without a change of the spec. The token appears nowhere."""
    wrong = f"hf_wrong-{uuid.uuid4().hex}"
    secret: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}}
    endpoint.cluster.apply(endpoint.namespace, {**secret, "stringData": {"token": wrong}})
    document = tiny(private_hub)
    document["spec"]["model"]["tokenSecretRef"] = {"name": "hub", "key": "token"}
    endpoint.apply(document)
    note(
        "bad token", wait_reported(endpoint, "ModelAccessDenied", "org/model", "spec.model.tokenSecretRef", timeout=90)
    )
    in_namespace = ("--namespace", endpoint.namespace)
    everything = endpoint.cluster.kubectl(
        "get", "inferenceendpoints,events,pods,deployments", *in_namespace, "-o", "yaml"
    )
    for pod in endpoint.pods():
        everything += endpoint.cluster.kubectl("logs", pod["metadata"]["name"], *in_namespace, check=False)
    assert wrong not in everything
    endpoint.cluster.apply(endpoint.namespace, {**secret, "stringData": {"token": _TOKEN}})
    fixed(endpoint, "ModelAccessDenied")


@pytest.mark.further
def test_no_hub(endpoint: Endpoint, hub: str, note: Note) -> None:
    nowhere = "http://no-such-hub.invalid"
    endpoint.apply(tiny(nowhere))
    note("no hub", wait_reported(endpoint, "DownloadFailed", nowhere, "network", timeout=120))
    endpoint.apply(tiny(hub))
    fixed(endpoint, "DownloadFailed")


@pytest.mark.further
def test_wrong_claim(endpoint: Endpoint, hub: str, note: Note) -> None:
    endpoint.apply(tiny(hub, source="pvc://no-such-claim/model"))
    note("wrong claim", wait_reported(endpoint, "VolumeNotBound", "no-such-claim", timeout=60))
    endpoint.patch(model={"source": "hf://org/model"})
    fixed(endpoint, "VolumeNotBound")


def test_memory_limit(endpoint: Endpoint, hub: str, note: Note) -> None:
    document = tiny(hub)
    document["spec"]["hardware"]["resources"] = {"limits": {"memory": "120Mi"}}
    endpoint.apply(document)
    note("memory limit", wait_reported(endpoint, "OOMKilled", "spec.hardware.resources.limits.memory", timeout=120))
    endpoint.patch(hardware={"resources": {"limits": {"memory": "3Gi"}}})
    fixed(endpoint, "OOMKilled")


@pytest.mark.further
def test_max_model_len_beyond_the_model(endpoint: Endpoint, hub: str, note: Note) -> None:
    document = tiny(hub)
    document["spec"]["engine"]["maxModelLen"] = 1_000_000
    endpoint.apply(document)
    note("maxModelLen beyond the model's", wait_reported(endpoint, "StartError", "1000000", "4096", timeout=90))
    endpoint.patch(engine={"maxModelLen": 2048, "quantization": "int8", "kvCacheDtype": "int8_per_token_head"})
    fixed(endpoint, "StartError")
    engine = wait_for(lambda: _stored(endpoint), "the status names how the model is stored", 60)
    assert engine == ("int8 in groups of 32", "int8_per_token_head")


def _stored(endpoint: Endpoint) -> tuple[str, str] | None:
    engine = endpoint.get()["status"]["workloads"][0]["engine"]
    return (engine["weights"], engine["kvCacheDtype"]) if "weights" in engine else None


@pytest.mark.further
def test_quota(endpoint: Endpoint, hub: str, note: Note) -> None:
    quota: Object = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}}
    endpoint.cluster.apply(endpoint.namespace, {**quota, "spec": {"hard": {"pods": "0"}}})
    endpoint.apply(tiny(hub))
    note("quota", wait_reported(endpoint, "QuotaExceeded", "none", "spec.replicas", timeout=60))
    endpoint.cluster.kubectl("delete", "resourcequota", "none", "--namespace", endpoint.namespace)
    fixed(endpoint, "QuotaExceeded")


def test_no_gpus(endpoint: Endpoint, images: Images, hub: str, note: Note) -> None:
    document = tiny(hub)
    document["spec"]["hardware"] = {"accelerator": "nvidia-h100-80gb", "count": 8}
    document["spec"]["engine"]["image"] = images.engine
    endpoint.apply(document)
    note("no GPUs", wait_reported(endpoint, "Unschedulable", "8", "nvidia.com/gpu", "spec.hardware", timeout=60))
    endpoint.apply(tiny(hub))
    fixed(endpoint, "Unschedulable")


def test_failing_rollout_keeps_serving_pods(endpoint: Endpoint, hub: str) -> None:
    """Rapid edits and reverts do not affect serving pods either."""
    endpoint.apply(tiny(hub))
    endpoint.wait_ready(_READY_S)
    wait_for(endpoint.serving, "its Service routes to the pod", 60)
    before = endpoint.lives()
    for attempt in range(5):
        endpoint.patch(engine={"image": f"stoker/no-such-image:{attempt}"})
    wait_reported(endpoint, "ImagePullError", "stoker/no-such-image:4", timeout=60)
    assert endpoint.condition("Available")["status"] == "True"
    assert endpoint.serving()
    assert before.items() <= endpoint.lives().items(), "the pod that serves is as it was"
    for image in ("stoker/no-such-image:5", None, "stoker/no-such-image:6", None):
        endpoint.patch(engine={"image": image})
    status = endpoint.wait_ready(60)
    assert not [each for each in status["conditions"] if "no-such-image" in each["message"]]
    wait_for(lambda: endpoint.lives() == before, f"only the first pod is left; {endpoint.lives()}", 60)


@pytest.mark.further
def test_no_room_for_an_additional_pod(endpoint: Endpoint, hub: str, note: Note) -> None:
    """A new pod does not fit beside the serving one; the remedy in the status works."""
    (node, *_) = (
        node["metadata"]["labels"]["kubernetes.io/hostname"]
        for node in endpoint.cluster.get("nodes", "-l", "!node-role.kubernetes.io/control-plane")["items"]
    )
    label: Object = {"app.kubernetes.io/instance": endpoint.name}
    alone = [{"labelSelector": {"matchLabels": label}, "topologyKey": "kubernetes.io/hostname"}]
    document = tiny(hub)
    document["spec"]["template"] = {
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": alone}},
        }
    }
    endpoint.apply(document)
    endpoint.wait_ready(_READY_S)
    before = endpoint.lives()
    endpoint.patch(engine={"maxNumSeqs": 4})
    note(
        "no room for a new pod",
        wait_reported(endpoint, "SurgeUnschedulable", "maxSurge to 0", "maxUnavailable", timeout=60),
    )
    assert endpoint.condition("Available")["status"] == "True"
    assert before.items() <= endpoint.lives().items()
    endpoint.patch(rollout={"maxSurge": 0, "maxUnavailable": 1})
    fixed(endpoint, "SurgeUnschedulable")
    assert "--max-num-seqs=4" in endpoint.pods()[0]["spec"]["containers"][0]["args"]


@pytest.mark.further
def test_pod_that_never_serves(endpoint: Endpoint, images: Images, hub: str, note: Note) -> None:
    document = tiny(hub)
    sleeper = {"name": "sleeper", "image": images.client, "command": ["sleep", "3600"], "securityContext": _RESTRICTED}
    document["spec"] |= {"template": {"spec": {"initContainers": [sleeper]}}, "rollout": {"startupTimeoutSeconds": 20}}
    endpoint.apply(document)
    note("never serves", wait_reported(endpoint, "StartupTimeout", "spec.rollout.startupTimeoutSeconds", timeout=90))
    assert endpoint.condition("Stalled")["status"] == "True"
    endpoint.patch(template=None, rollout=None)
    fixed(endpoint, "StartupTimeout")
