"""One pod with four computing processes (examples/09-ranks-on-cpu.yaml): two engines of a model, each with two ranks.

Asserted: it becomes ready, and generates the same as one process; a rolling update breaks no request; when a rank or an
engine process is killed, only requests in flight there fail, the other engine serves meanwhile, the pod stays ready and
is not restarted, and the status names the engine until it serves again.

Real: the engine and its ranks, the kubelet, the operator. The engines share two or more CPUs.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from kit.cluster import Cluster, Images, Object
from kit.endpoint import Endpoint, demo, example, merged
from kit.namespace import fresh
from kit.results import Results
from kit.traffic import listed, traffic
from kit.waiting import wait_for

#: Time until ready in seconds: eight processes import torch, two at a time on two CPUs.
_READY_S = 600
#: Time for which requests may still be sent to a killed engine, in seconds.
_NOTICED_S = 5

#: Kills the first process whose command line contains these words, and prints it.
_KILL = """
import os, pathlib, signal
for cmdline in sorted(pathlib.Path("/proc").glob("[0-9]*/cmdline"), key=lambda path: int(path.parent.name)):
    pid = int(cmdline.parent.name)
    if {words!r} in cmdline.read_bytes() and pid not in (1, os.getpid()):
        print(pid, cmdline.read_bytes())
        os.kill(pid, signal.SIGKILL)
        break
"""

_ASK = """
import json, urllib.request
body = json.dumps({request!r}).encode()
request = urllib.request.Request("http://localhost:8000/v1/completions", body, {{"Content-Type": "application/json"}})
print(urllib.request.urlopen(request, timeout=300).read().decode())
"""


@pytest.fixture(scope="module")
def space(cluster: Cluster, chart: None) -> Iterator[str]:
    with fresh(cluster, "ranks") as namespace:
        yield namespace


@pytest.fixture(scope="module")
def endpoint(cluster: Cluster, space: str) -> Endpoint:
    """The example, with resource requests that fit twice on a small node."""
    document = example("09-ranks-on-cpu.yaml")
    changes: Object = {
        "hardware": {"resources": {"requests": {"cpu": "200m", "memory": "1Gi"}}},
        "rollout": {"drainSeconds": 20, "startupTimeoutSeconds": _READY_S},
        "engine": {"maxModelLen": 2048, "dtype": "float32"},  # makes tokens independent of the ranks
    }
    document["spec"] = {**merged(document["spec"], changes), "model": demo()["spec"]["model"]}
    made = Endpoint(cluster, space, "ranks")
    made.apply(document)
    return made


@pytest.fixture
def namespace(space: str) -> str:
    """The namespace that is shown when a test fails."""
    return space


def kill(endpoint: Endpoint, words: bytes) -> float:
    """Kill a process of the endpoint's pod; return the time by the node's clock."""
    pod = endpoint.pods()[0]["metadata"]["name"]
    killed = endpoint.run(pod, _KILL.format(words=words))
    assert killed.strip(), f"no process has {words!r} in its command line"
    return time.time()


def answers(endpoint: Endpoint, model: str, prompts: list[str]) -> list[Any]:
    """Return the logprobs of each prompt's completion: its tokens, and the two most likely at each position."""
    pod = endpoint.pods()[0]["metadata"]["name"]
    request = {"model": model, "prompt": prompts, "max_tokens": 24, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    return [each["logprobs"] for each in json.loads(endpoint.run(pod, _ASK.format(request=request)))["choices"]]


def copies(endpoint: Endpoint) -> Object:
    """Return the status of its engines."""
    found: Object = endpoint.get()["status"]["workloads"][0]["engine"]
    return found


@pytest.mark.timeout(1800)
def test_ranks_produce_the_output_of_one_process(
    cluster: Cluster, endpoint: Endpoint, space: str, results: Results
) -> None:
    began = time.monotonic()
    status = endpoint.wait_ready(_READY_S)
    results.add("ranks: TP 2 × DP 2 ready", recovery=time.monotonic() - began)
    plan = status["workloads"][0]["plan"]
    assert (plan["tensor"], plan["data"]) == (2, 2)
    # The reported workload may be seconds older than the pod's readiness.
    workload = wait_for(
        lambda: found if (found := copies(endpoint)).get("servingCopies") == 2 else None, "both engines serve", 60
    )
    assert workload["copies"] == 2
    assert all(each["ranks"] == 2 and "missingRanks" not in each for each in workload["copyStates"])
    assert {each["kvBlocks"] for each in workload["copyStates"]} == {plan["kvBlocks"]}
    assert endpoint.wait_reason("EveryCopyServes", "Degraded")

    alone = Endpoint(cluster, space, "alone")
    alone.apply(demo("alone", engine={"maxModelLen": 2048}))
    alone.wait_ready()
    # More prompts than engines, so that both engines get some.
    prompts = [f"{uuid.UUID(int=seed)} The capital of France is" for seed in range(6)]
    several = answers(endpoint, "gemma-3-270m", prompts)
    one = answers(alone, "gemma-3-270m", prompts)
    for of_ranks, of_one_process in zip(several, one, strict=True):
        pairs = enumerate(zip(of_ranks["tokens"], of_one_process["tokens"], strict=True))
        parted = next((at for at, (our, their) in pairs if our != their), None)
        if parted is not None:  # only if two tokens are almost equally likely
            best, second = sorted(of_one_process["top_logprobs"][parted].values(), reverse=True)[:2]
            assert best - second < 1e-3, (of_ranks["tokens"], of_one_process["tokens"])
    alone.delete()


@pytest.mark.further
@pytest.mark.timeout(1800)
def test_rolling_update_costs_no_request(endpoint: Endpoint, images: Images, results: Results, namespace: str) -> None:
    url = endpoint.wait_ready(_READY_S)["url"]
    before = set(endpoint.lives())
    with traffic(endpoint.cluster, namespace, images.client, url) as flow:
        began = time.monotonic()
        endpoint.patch(engine={"maxNumSeqs": 8})
        endpoint.wait_ready(_READY_S)
        wait_for(lambda: not before & set(endpoint.lives()), "the old pod has ended", 120)
        recovery = time.monotonic() - began
        flow.wait_for(10)
    results.add("ranks: rolling update", flow.result, recovery)
    flow.result.unbroken()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("victim", "words"),
    [("rank", b"exec.rank_main"), pytest.param("engine", b"processes.main", marks=pytest.mark.further)],
)
def test_killed_engine_is_loaded_again_while_the_other_serves(
    endpoint: Endpoint, images: Images, results: Results, namespace: str, victim: str, words: bytes
) -> None:
    url = endpoint.wait_ready(_READY_S)["url"]
    lives = endpoint.lives()
    with traffic(endpoint.cluster, namespace, images.client, url, workers=3) as flow:
        struck = kill(endpoint, words)
        endpoint.wait_reason("CopyDown", "Degraded", "True", timeout=60)
        reported = time.time() - struck
        # For a moment only the failure may be known, without its cause.
        names = re.compile(
            "lacks rank.*" + (r"rank \d of 2 was killed by signal 9" if victim == "rank" else ""), re.DOTALL
        )
        match = wait_for(
            lambda: names.search(endpoint.condition("Degraded").get("message", "")), f"{names.pattern}", 30
        )
        flow.wait_for(5)
        assert endpoint.ready(), "an engine serves"
        endpoint.wait_reason("EveryCopyServes", "Degraded", timeout=_READY_S)
        recovery = time.time() - struck
        flow.wait_for(10)
    results.add(f"ranks: a {victim} SIGKILLed (reported after {reported:.0f} s)", flow.result, recovery)
    assert "1 of 2 engines does not accept requests" in match.string
    broken = flow.result.broken
    assert len(broken) <= 3, listed(broken)
    late = [each for each in broken if each.start >= struck + _NOTICED_S]
    assert not late, f"struck at {struck}\n{listed(late)}"
    assert endpoint.lives() == lives  # the pod was neither replaced nor restarted
