"""vLLM in pods: the steps of docs/tutorials/06-from-vllm.md under traffic, and properties of its pods.

Asserted: a plain `vllm serve` Deployment, an endpoint of runtime vllm with the same arguments, and that endpoint with
runtime stoker replace each other while an application sends requests, none of which fails or is cut. A pod of vLLM runs
unprivileged on a read-only root, requires the API key, reports its KV cache, and its failures are reported by reason.

Requires VLLM_IMAGE, the name of a vLLM image for CPUs (`build` in this folder makes one); it takes minutes, mostly for
vLLM's start.
"""

from __future__ import annotations

import json
import os
import re
import time
from typing import Any

import pytest
from kit import hub as hubs
from kit.cluster import Cluster, Images, Object
from kit.endpoint import Endpoint, merged
from kit.results import Results
from kit.tiny import tiny_llama
from kit.traffic import traffic
from kit.waiting import wait_for

IMAGE = os.environ.get("VLLM_IMAGE", "")
pytestmark = pytest.mark.skipif(
    not IMAGE, reason="VLLM_IMAGE names no image of vLLM for CPUs; e2e/vllm/build makes one"
)

#: Time for vLLM to start, in seconds: on a shared CPU each of its three processes imports for a minute.
_START_S = 600
_KEY = "key-of-the-application"
#: Smallest shape for which vLLM has an attention kernel.
_SHAPE = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
_CACHE_BYTES = 64 * 2**20
#: Flags without a field of the endpoint; eager because the image has no compiler.
_FLAGS = ["--enforce-eager", f"--kv-cache-memory-bytes={_CACHE_BYTES}"]
_RESOURCES = {"requests": {"cpu": "300m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}}
_METRICS = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:8000/metrics').read().decode())"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tiny Llama."""
    return tiny_llama(tmp_path_factory.mktemp("model"), **_SHAPE)


@pytest.fixture(scope="module")
def placed(cluster: Cluster) -> Object:
    """Selector of a node that has the image, perhaps the only one; empty if no node reports it."""
    for node in cluster.get("nodes")["items"]:
        if any(IMAGE in name for each in node["status"].get("images", ()) for name in each["names"] or ()):
            return {"kubernetes.io/hostname": node["metadata"]["name"]}
    return {}


def secret() -> Object:
    """Return the Secret with the API key, which all servers use."""
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"api-key": _KEY}}


def plain(hub: str, placed: Object) -> list[Object]:
    """Return `vllm serve` in a plain Deployment with a Service."""
    labels = {"app": "plain"}
    key = {"secretKeyRef": {"name": "keys", "key": "api-key"}}
    container = {
        "name": "vllm",
        "image": IMAGE,
        "command": ["vllm", "serve"],
        "args": [
            "org/model",
            "--served-model-name=tiny",
            "--max-model-len=1024",
            f"--chat-template={_TEMPLATE}",
            *_FLAGS,
        ],
        "env": [{"name": "HF_ENDPOINT", "value": hub}, {"name": "VLLM_API_KEY", "valueFrom": key}],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 2},
        "resources": _RESOURCES,
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    pods = {
        "metadata": {"labels": labels},
        "spec": {"nodeSelector": placed, "containers": [container], "volumes": [shm]},
    }
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "plain"},
            "spec": {"selector": {"matchLabels": labels}, "template": pods},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "llm"},
            "spec": {"selector": labels, "ports": [{"port": 8000, "targetPort": "http"}]},
        },
    ]


def same(hub: str, placed: Object, **changes: Any) -> Object:
    """Return an endpoint with the same settings as `plain`."""
    spec: Object = {
        "model": {"source": "hf://org/model", "servedNames": ["tiny"], "chatTemplate": {"value": _TEMPLATE}},
        "hardware": {"accelerator": "cpu", "resources": _RESOURCES},
        "engine": {
            "runtime": "vllm",
            "image": IMAGE,
            "maxModelLen": 1024,
            "args": _FLAGS,
            "env": [{"name": "HF_ENDPOINT", "value": hub}],
        },
        "auth": {"apiKeysSecretRef": {"name": "keys"}},
        "rollout": {"startupTimeoutSeconds": _START_S},
        "template": {"spec": {"nodeSelector": placed}},
    }
    return {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "InferenceEndpoint",
        "metadata": {"name": "demo"},
        "spec": merged(spec, changes),
    }


@pytest.mark.timeout(2400)
def test_migration_costs_no_request(
    cluster: Cluster,
    images: Images,
    chart: None,
    namespace: str,
    results: Results,
    placed: Object,
    model: dict[str, bytes],
) -> None:
    in_namespace = ("--namespace", namespace)
    hub = hubs.start(cluster, namespace, images.client, model).url
    cluster.apply(namespace, secret(), *plain(hub, placed))
    began = time.monotonic()
    cluster.kubectl("rollout", "status", "deployment/plain", *in_namespace, f"--timeout={_START_S}s")
    results.add("vLLM: start of a plain Deployment", recovery=time.monotonic() - began)
    endpoint = Endpoint(cluster, namespace)

    with traffic(cluster, namespace, images.client, f"http://llm.{namespace}.svc:8000/v1", api_key=_KEY) as flow:
        began = time.monotonic()
        endpoint.apply(same(hub, placed))
        status = endpoint.wait_ready(_START_S)
        results.add("vLLM: start of an endpoint beside it", recovery=time.monotonic() - began)
        selector = {"app.kubernetes.io/instance": "demo"}
        replace = [{"op": "replace", "path": "/spec/selector", "value": selector}]
        cluster.kubectl("patch", "service", "llm", *in_namespace, "--type=json", "-p", json.dumps(replace))
        wait_for(lambda: rests(cluster, namespace), "the old pod has no more to do", 300, every=5)
        cluster.kubectl("delete", "deployment", "plain", *in_namespace)
        plain_pods = ("pods", *in_namespace, "-l", "app=plain")
        wait_for(lambda: not cluster.get(*plain_pods)["items"], "the plain pods have ended", 300)
        flow.wait_for(5)
    results.add("vLLM: move from a plain Deployment to runtime vllm", flow.result)
    flow.result.unbroken()

    like_any_other_pod(endpoint, status)
    assert status_code(endpoint, "wrong") == 401
    assert status_code(endpoint, _KEY) == 200

    with traffic(cluster, namespace, images.client, f"http://llm.{namespace}.svc:8000/v1", api_key=_KEY) as flow:
        old = {pod["metadata"]["name"] for pod in endpoint.pods()}
        began = time.monotonic()
        endpoint.patch(engine={"runtime": "stoker", "image": images.engine, "args": [_FLAGS[1]]})
        endpoint.wait_ready(_START_S)

        def ended() -> bool:
            names = {pod["metadata"]["name"] for pod in cluster.get("pods", *in_namespace)["items"]}
            return not old & names

        wait_for(ended, "vLLM's pods have ended", 300)
        seconds = time.monotonic() - began
        flow.wait_for(5)
    results.add("vLLM: runtime vllm to runtime stoker", flow.result, seconds)
    flow.result.unbroken()
    (pod,) = endpoint.pods()
    assert pod["spec"]["containers"][0]["image"] == images.engine


def rests(cluster: Cluster, namespace: str) -> bool:
    """Return whether the plain pod has no clients: no request now, and no new response for some seconds."""
    (pod,) = cluster.get("pods", "--namespace", namespace, "-l", "app=plain")["items"]
    metrics = f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}:8000/proxy/metrics"

    def metric_value(metric: str) -> float:
        text = cluster.kubectl("get", "--raw", metrics)
        return sum(map(float, re.findall(rf"^{metric}\{{.*\}} (.*)$", text, re.MULTILINE)))

    before = metric_value("vllm:request_success_total")
    time.sleep(5)  # sleeps: there is no event for the absence of responses
    busy = metric_value("vllm:num_requests_running") + metric_value("vllm:num_requests_waiting")
    return not busy and metric_value("vllm:request_success_total") == before


def like_any_other_pod(endpoint: Endpoint, status: Object) -> None:
    """Assert that vLLM's pod has the properties that the pods of every runtime have."""
    (pod,) = endpoint.pods()
    name = pod["metadata"]["name"]
    probe = """
import os, pathlib
def writes(folder):
    try:
        pathlib.Path(folder, "x").touch()
        return True
    except OSError:
        return False
print(os.getuid(), writes("/opt"), writes("/var/tmp"), writes(os.environ["HOME"]))
"""
    assert endpoint.run(name, probe).split() == ["65532", "False", "False", "True"]
    metrics = endpoint.run(name, _METRICS)
    blocks = re.search(r'^vllm:cache_config_info\{.*num_gpu_blocks="(\d+)"', metrics, re.M)
    assert blocks
    workload = status["workloads"][0]
    assert (workload["runtime"], workload["image"]) == ("vllm", IMAGE)
    measured = wait_for(lambda: endpoint.get()["status"]["workloads"][0]["engine"].get("kvBlocks"), "kvBlocks", 60)
    assert measured == int(blocks[1])
    assert set(_FLAGS) <= set(workload["engine"]["args"])
    assert _KEY not in json.dumps(endpoint.get()) + json.dumps(pod)


def status_code(endpoint: Endpoint, key: str) -> int:
    """Return the status of the response to a request with this key."""
    (pod,) = endpoint.pods()
    code = f"""
import urllib.error, urllib.request
request = urllib.request.Request("http://demo:8000/v1/models", headers={{"Authorization": "Bearer {key}"}})
try:
    print(urllib.request.urlopen(request).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""
    return int(endpoint.run(pod["metadata"]["name"], code))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("changes", "reason", "says"),
    [
        ({"model": {"source": "hf://org/nothing"}}, "ModelNotFound", "spec.model.source"),
        ({"engine": {"maxModelLen": 8192}}, "CrashLoopBackOff", "max_model_len (8192)"),
    ],
    ids=["no-such-model", "beyond-the-model"],
)
def test_start_errors_are_reported_with_their_reason(
    cluster: Cluster,
    images: Images,
    chart: None,
    namespace: str,
    results: Results,
    placed: Object,
    model: dict[str, bytes],
    changes: Object,
    reason: str,
    says: str,
) -> None:
    hub = hubs.start(cluster, namespace, images.client, model).url
    cluster.apply(namespace, secret())
    endpoint = Endpoint(cluster, namespace)
    began = time.monotonic()
    endpoint.apply(same(hub, placed, **changes))
    condition = endpoint.wait_reason(reason, timeout=_START_S)
    results.add(f"vLLM: {', '.join(changes)} reported as {reason}", recovery=time.monotonic() - began)
    assert says in condition["message"], condition["message"]
