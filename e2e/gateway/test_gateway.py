"""The gateway on a cluster: who is served, and what clients notice of changes and deaths.

Two replicas of it, two pods of the model; clients do not retry. Asserted: a rolling update of the model, the end of a
gateway's pod and the death of the operator cost no request; where a pod of the model is killed, only what it was
computing breaks off; where a pod of the gateway is killed, only what went through it; where pickers are killed, no
answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from kit import chart as release
from kit.cluster import Cluster, Images, Object
from kit.endpoint import Endpoint, demo
from kit.namespace import fresh
from kit.results import Results
from kit.traffic import listed, traffic
from kit.waiting import wait_for

from .conftest import URL

#: What a request gets: its status, and its body.
ASK = """
import json, sys, urllib.error, urllib.request
path, key, body = sys.argv[1:]
headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
request = urllib.request.Request(path, body.encode() or None, headers)
try:
    answer = urllib.request.urlopen(request, timeout=60)
except urllib.error.HTTPError as error:
    answer = error
print(json.dumps([answer.status, json.load(answer)]))
"""

#: Kills a gateway's picker, and says how many there were.
KILL_PICKER = """
import os, pathlib, signal
found = []
for each in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        if int(each.parent.name) != os.getpid() and b"stoker_gateway.cli.picker" in each.read_bytes():
            found.append(int(each.parent.name))
    except OSError:
        pass
for pid in found:
    os.kill(pid, signal.SIGKILL)
print(len(found))
"""


@pytest.fixture
def ask(endpoint: Endpoint) -> Callable[..., tuple[int, Object]]:
    """``ask("/models", key)``, from a pod of the cluster."""

    def run(path: str, key: str = "", body: Object | None = None) -> tuple[int, Object]:
        words = (f"{URL}{path}", key, json.dumps(body) if body else "")
        pod = endpoint.pods()[0]["metadata"]["name"]
        here = ("exec", "--namespace", endpoint.namespace, pod, "--container", "engine", "--")
        status, answer = json.loads(endpoint.cluster.kubectl(*here, "python3", "-c", ASK, *words))
        return status, answer

    return run


def gateway_pods(cluster: Cluster) -> list[Object]:
    selector = ("-l", "app.kubernetes.io/name=stoker-gateway", "--namespace", release.SYSTEM)
    items = cluster.get("pods", *selector)["items"]
    return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]


def ready_gateways(cluster: Cluster) -> int:
    return sum(
        each["type"] == "Ready" and each["status"] == "True"
        for pod in gateway_pods(cluster)
        for each in pod["status"].get("conditions", ())
    )


@pytest.mark.timeout(900)
def test_who_is_served(
    cluster: Cluster, endpoint: Endpoint, keys: Callable[..., str], ask: Callable[..., tuple[int, Object]]
) -> None:
    status = endpoint.wait_ready()
    wait_for(lambda: {"name": "gateway", "url": URL} in endpoint.get()["status"]["addresses"], "it is routed", 60)
    assert status["url"] != URL
    served = {"model": "gemma-3-270m", "prompt": "Hello", "max_tokens": 3}
    key, other = keys("create", "--id=mine"), keys("create", "--id=other", "--model=another")
    wait_for(lambda: ask("/models", key)[0] == 200, "the key is known", 10)
    name = endpoint.get()["spec"]["model"].get("name") or ask("/models", key)[1]["data"][0]["id"]
    served["model"] = name
    assert [each["id"] for each in ask("/models", key)[1]["data"]] == [name]
    assert ask("/completions", key, served)[1]["usage"]["completion_tokens"] == 3
    assert (ask("/completions", "", served)[0], ask("/completions", "sk-no", served)[0]) == (401, 401)
    wait_for(lambda: ask("/models", other)[0] == 200, "the other key is known", 10)
    assert ask("/models", other)[1]["data"] == []
    assert ask("/completions", other, served)[0] == 404
    assert ask("/../metrics", key)[0] == 404

    # Another namespace's endpoint of that name, younger, has none of it, nor one that has not opted in.
    with fresh(cluster, "claims-the-name") as namespace:
        second = Endpoint(cluster, namespace)
        second.apply(demo(model={"servedNames": [name]}))
        wait_for(lambda: second.condition("Routed").get("status") == "False", "it has not opted in", 60)
        cluster.kubectl("label", "namespace", namespace, "stoker.dev/gateway=enabled")
        second.wait_reason("NameTaken", "Routed")
        assert "behind-gateway" not in json.dumps(second.get()["status"])
        second.delete()
    assert ask("/completions", key, served)[0] == 200

    keys("revoke", "mine")
    revoked = time.monotonic()
    wait_for(lambda: ask("/completions", key, served)[0] == 401, "it is revoked", 60)
    print(f"revoked after {time.monotonic() - revoked:.1f} s")
    keys("revoke", "other")


@pytest.mark.timeout(1200)
def test_changes_cost_no_request(endpoint: Endpoint, images: Images, results: Results, key: str) -> None:
    cluster = endpoint.cluster
    endpoint.wait_ready()
    with traffic(cluster, endpoint.namespace, images.client, URL, api_key=key) as flow:
        began, before = time.monotonic(), set(endpoint.lives())
        endpoint.patch(engine={"maxNumSeqs": 8})
        endpoint.wait_ready(420)
        assert not before & set(endpoint.lives())
        flow.wait_for(5)
        gone = gateway_pods(cluster)[0]["metadata"]["name"]
        cluster.kubectl("delete", "pod", gone, "--namespace", release.SYSTEM)
        wait_for(lambda: ready_gateways(cluster) == 2, "two gateways are ready", 120)
        for name in release.operator_pods(cluster):
            cluster.kubectl("delete", "pod", name, "--namespace", release.SYSTEM, "--grace-period=0", "--force")
        recovery = time.monotonic() - began
        flow.wait_for(10)
    results.add("gateway: rolling update, a gateway ends, operators killed", flow.result, recovery)
    flow.result.unbroken()


@pytest.mark.timeout(1200)
def test_a_killed_pod_breaks_off_what_it_computed(
    endpoint: Endpoint, images: Images, results: Results, key: str
) -> None:
    endpoint.wait_ready()
    with traffic(endpoint.cluster, endpoint.namespace, images.client, URL, workers=3, api_key=key) as flow:
        pod = endpoint.pods()[0]["metadata"]["name"]
        struck = time.time()
        endpoint.cluster.kubectl("delete", "pod", pod, "--namespace", endpoint.namespace, "--grace-period=0", "--force")
        wait_for(lambda: len(endpoint.serving()) == 2, "two pods serve again", 240)
        recovery = time.time() - struck
        flow.wait_for(10)
    results.add("gateway: a model's pod killed", flow.result, recovery)
    broken = flow.result.broken
    assert len(broken) <= 3 and not [each for each in broken if each.outcome == "failed"], listed(broken)


@pytest.mark.timeout(1200)
def test_a_killed_gateway_breaks_off_what_went_through_it(
    endpoint: Endpoint, images: Images, results: Results, key: str
) -> None:
    cluster = endpoint.cluster
    with traffic(cluster, endpoint.namespace, images.client, URL, workers=3, api_key=key) as flow:
        pod = gateway_pods(cluster)[0]["metadata"]["name"]
        struck = time.time()
        cluster.kubectl("delete", "pod", pod, "--namespace", release.SYSTEM, "--grace-period=0", "--force")
        wait_for(lambda: ready_gateways(cluster) == 2, "two gateways are ready", 120)
        recovery = time.time() - struck
        flow.wait_for(10)
    results.add("gateway: one of two killed", flow.result, recovery)
    late = [each for each in flow.result.broken if each.start > struck + 10]
    assert not late, listed(late)


@pytest.mark.timeout(1200)
def test_a_killed_picker_breaks_off_no_answer(endpoint: Endpoint, images: Images, results: Results, key: str) -> None:
    cluster = endpoint.cluster
    endpoint.wait_ready()
    with traffic(cluster, endpoint.namespace, images.client, URL, workers=3, api_key=key) as flow:
        struck = time.time()
        for pod in gateway_pods(cluster):
            here = ("exec", "--namespace", release.SYSTEM, pod["metadata"]["name"], "--")
            assert cluster.kubectl(*here, "python3", "-c", KILL_PICKER).strip() == "1"
        wait_for(lambda: ready_gateways(cluster) == 2, "two gateways are ready", 120)
        recovery = time.time() - struck
        flow.wait_for(10)
    results.add("gateway: both pickers killed", flow.result, recovery)
    assert not flow.result.cut, listed(flow.result.cut)
    # What was being decided, and what came until the next picker served, may be tried again.
    for each in flow.result.failed:
        assert "Error code: 503" in each.error and struck - 5 < each.start < struck + 20, listed(flow.result.failed)
