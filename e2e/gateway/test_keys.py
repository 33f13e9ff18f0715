"""Access by keys through the gateway of a cluster.

Asserted: which models a key may list and use; a name belongs to the older endpoint; both replicas refuse a revoked key
within seconds; a client that floods the pods with one key does not starve another key's requests.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from functools import partial
from statistics import quantiles

import pytest
from kit.cluster import Cluster, Images, Object
from kit.endpoint import Endpoint, demo
from kit.namespace import fresh
from kit.results import Results
from kit.traffic import listed, traffic
from kit.waiting import wait_for

from .conftest import URL

#: Sends a request, and prints status and body of its response.
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

#: Prints that a key was accepted, later when it was last accepted; ends after twenty consecutive refusals, or after a
#: minute.
ASK_UNTIL_REFUSED = """
import sys, time, urllib.error, urllib.request
url, key = sys.argv[1:]
accepted, served, refused, until = 0, 0, 0, time.time() + 60
while refused < 20 and time.time() < until:
    asked = time.time()
    try:
        urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"}), timeout=60)
        accepted, served, refused = asked, served + 1, 0
        if served == 1:
            print("served", flush=True)
    except urllib.error.HTTPError as error:
        assert error.code == 401, error
        refused += 1
    time.sleep(0.05)
print(accepted, served, refused)
"""
#: Longest time until a change of keys applies, in seconds.
IN_FORCE = 5


@pytest.fixture
def ask(endpoint: Endpoint) -> Callable[..., tuple[int, Object]]:
    """Send a request from a pod of the cluster: ``ask("/models", key)``."""

    def run(path: str, key: str = "", body: Object | None = None) -> tuple[int, Object]:
        words = (f"{URL}{path}", key, json.dumps(body) if body else "")
        pod = endpoint.pods()[0]["metadata"]["name"]
        exec_in_pod = ("exec", "--namespace", endpoint.namespace, pod, "--container", "engine", "--")
        status, answer = json.loads(endpoint.cluster.kubectl(*exec_in_pod, "python3", "-c", ASK, *words))
        return status, answer

    return run


@pytest.mark.timeout(900)
def test_requests_are_served_only_with_a_permitted_key(
    cluster: Cluster, endpoint: Endpoint, keys: Callable[..., str], ask: Callable[..., tuple[int, Object]]
) -> None:
    status = endpoint.wait_ready()
    wait_for(lambda: {"name": "gateway", "url": URL} in endpoint.get()["status"]["addresses"], "it is routed", 60)
    assert status["url"] != URL
    served = {"model": "gemma-3-270m", "prompt": "Hello", "max_tokens": 3}
    key, key_of_another_model = keys("create", "--id=mine"), keys("create", "--id=other", "--model=another")
    wait_for(lambda: ask("/models", key)[0] == 200, "the key is known", 10)
    name = endpoint.get()["spec"]["model"].get("name") or ask("/models", key)[1]["data"][0]["id"]
    served["model"] = name
    assert [each["id"] for each in ask("/models", key)[1]["data"]] == [name]
    assert ask("/completions", key, served)[1]["usage"]["completion_tokens"] == 3
    assert (ask("/completions", "", served)[0], ask("/completions", "sk-no", served)[0]) == (401, 401)
    wait_for(lambda: ask("/models", key_of_another_model)[0] == 200, "the other key is known", 10)
    assert ask("/models", key_of_another_model)[1]["data"] == []
    assert ask("/completions", key_of_another_model, served)[0] == 404
    assert ask("/../metrics", key)[0] == 404

    # Neither a younger endpoint of that name in another namespace nor one that has not opted in gets requests.
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
    wait_for(lambda: ask("/completions", key, served)[0] == 401, "it is revoked", 60)
    keys("revoke", "other")


@pytest.mark.timeout(600)
def test_a_revoked_key_is_refused_within_seconds(endpoint: Endpoint, keys: Callable[..., str]) -> None:
    key = keys("create", "--id=leaver")
    pod = endpoint.pods()[0]["metadata"]["name"]
    exec_in_pod = ("exec", "--namespace", endpoint.namespace, pod, "--container", "engine", "--")
    time.sleep(IN_FORCE)  # sleeps: until each replica knows the key
    command = ["kubectl", *exec_in_pod, "python3", "-c", ASK_UNTIL_REFUSED, f"{URL}/models", key]
    environment = os.environ | endpoint.cluster.environment
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        assert asking.stdout.readline() == "served\n"
        revoked = time.time()
        keys("revoke", "leaver")
        accepted, _, refused = map(float, asking.stdout.read().split())
    print(f"last accepted {accepted - revoked:.2f} s after it was revoked")
    assert refused == 20, "a replica still accepts it"


@pytest.mark.further
@pytest.mark.timeout(900)
def test_flooding_key_does_not_starve_others(
    endpoint: Endpoint, images: Images, results: Results, keys: Callable[..., str]
) -> None:
    """The limit of concurrent requests bounds a key: the flooding client may have one at a time, and sends far more.

    The delay of the other client's requests is reported but not asserted: on a busy machine it is noise.
    """
    cluster, namespace = endpoint.cluster, endpoint.namespace
    quiet, loud = keys("create", "--id=quiet"), keys("create", "--id=loud", "--concurrency=1")
    time.sleep(IN_FORCE)  # sleeps: until each replica knows the keys
    endpoint.wait_ready()
    calm = partial(traffic, cluster, namespace, images.client, URL, workers=1, api_key=quiet, arguments=("64", "0.05"))
    with calm() as alone:
        alone.wait_for(100)
    with (
        traffic(cluster, namespace, images.client, URL, workers=16, api_key=loud, arguments=("64", "0.5")) as flood,
        calm() as beside,
    ):
        beside.wait_for(100)
    keys("revoke", "quiet")
    keys("revoke", "loud")
    for name, flow in (("alone", alone), ("beside a flood", beside), ("that floods", flood)):
        times = flow.result.times_to_first_token
        of_hundred = quantiles(times, n=100, method="inclusive")
        percentiles = f"{of_hundred[49] * 1e3:.0f}, p99 {of_hundred[98] * 1e3:.0f} ms"
        results.add(f"gateway: a key {name}: time to first token p50 {percentiles}", flow.result, 0)
    alone.result.unbroken()
    beside.result.unbroken()
    refused = flood.result.failed
    assert not flood.result.cut and len(refused) > flood.result.sent / 2, "this is no flood"
    assert all("Error code: 429" in each.error for each in refused), listed(refused[:10])
