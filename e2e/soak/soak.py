"""A soak: half an hour of mixed traffic with random faults; fails on errors and leaks.

    make soak [MINUTES=30] [SEED=0] [RESULTS=docs/results/soak-results.md]

There are two endpoints. One has two pods of the demo model, which faults hit one after another (`faults.py`). The other
has one pod of a tiny model, which serves many more requests and is never disturbed, so that its processes live through
the whole soak. Both get all kinds of requests (`client.py`), in rounds with an idle moment after each.

Asserted: requests fail only on a pod whose engine has just been killed or frozen; the same greedy request always has
the same output; after each fault everything recovers and a change takes effect; faults of the control plane restart no
model pod; at idle moments nothing is in flight and no block of the KV cache is in use; memory, open files and threads
are flat (`drift_check.py`); at the end no object exists twice or without an owner, one operator leads, and deleted
objects are gone.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kit import hub as hubs
from kit.cluster import Cluster, Images, Object
from kit.endpoint import Endpoint, demo, merged
from kit.tiny import tiny, tiny_llama
from kit.traffic import Flow, traffic
from kit.waiting import wait_for

from soak.faults import REPLICAS, Fault, Site, schedule, tolerating_outage
from soak.record import Record, Strike
from soak.samples import Watch, Watched, at_rest

MINUTES = float(os.environ.get("MINUTES") or 30)
SEED = int(os.environ.get("SEED") or 0)

_STEADY, _STRUCK = "steady", "struck"
_CLIENT = Path(__file__).with_name("client.py")
_KEY = "key-of-the-soak-5d20"
_ROUND_MINUTES = 5
#: Workers per endpoint, and their pause after a request in seconds: without it the tiny model would take all CPUs.
#: There are enough workers that a server soon has its final number of threads, with their memory.
_ASKING = {_STRUCK: (2, 0.0), _STEADY: (4, 0.8)}
#: Range of the pause between a recovery and the next fault, in seconds.
_BREATHER_S = (5, 15)
#: Time until an engine without requests holds no resources for any, in seconds.
_REST_S = 60

Say = Callable[[str], None]


def struck_manifest() -> Object:
    """Return the endpoint with two pods of the demo model, with few enough blocks to use all in the warm-up."""
    return demo(
        _STRUCK,
        replicas=REPLICAS,
        auth={"apiKeysSecretRef": {"name": "keys"}},
        engine={
            "maxModelLen": 2048,
            "args": ["--num-gpu-blocks-override=1024", "--max-request-bytes=1000000", "--max-num-queued-reqs=64"],
        },
        rollout={"drainSeconds": 60},
    )


def steady_manifest(hub: str, node: str) -> Object:
    """Return the endpoint of the tiny model, on a node that is never drained; few blocks force preemptions."""
    document = tiny(
        hub,
        _STEADY,
        auth={"apiKeysSecretRef": {"name": "keys"}},
        template={"spec": {"nodeSelector": {"kubernetes.io/hostname": node}}},
    )
    template = struck_manifest()["spec"]["model"]["chatTemplate"]
    args = ["--num-gpu-blocks-override=288", "--max-request-bytes=1000000", "--max-num-queued-reqs=64"]
    changes = {"model": {"chatTemplate": template}, "engine": {"args": args}}
    document["spec"] = merged(document["spec"], changes)
    return document


@contextlib.contextmanager
def traffic_to_both(record: Record, endpoints: list[Endpoint], image: str, number: int) -> Iterator[None]:
    """Send traffic to both endpoints during the block; add it to the record afterwards."""
    with contextlib.ExitStack() as flowing:
        flows: dict[str, Flow] = {}
        for endpoint in endpoints:
            workers, pause = _ASKING[endpoint.name]
            seed = f"{record.seed} {endpoint.name} {number}"
            flows[endpoint.name] = flowing.enter_context(
                traffic(
                    endpoint.cluster, endpoint.namespace, image, endpoint.wait_ready()["url"], workers, _KEY,
                    program=_CLIENT, arguments=(seed, str(pause)),
                )
            )  # fmt: skip
        yield
    for name, flow in flows.items():
        record.requests[name] += flow.result.requests


def struck_by(fault: Fault, site: Site, record: Record, say: Say) -> None:
    """Trigger one fault, and wait for the recovery."""
    say(fault.name)
    lives, began = site.endpoint.lives(), time.time()
    blow = fault.strike(site)
    site.wait_recovered()
    restarted = site.endpoint.lives() != lives
    until = (blow.heard if restarted else blow.struck) if blow else None
    record.strikes.append(Strike(fault.name, began, until, time.time()))
    say(f"{fault.name}: all is well after {time.time() - began:.0f} s")
    if restarted and not fault.restarts:
        record.problems.append(f"{fault.name}: pods of {site.endpoint.name} were restarted")


def check_at_rest(watch: Watch, record: Record, endpoints: list[Endpoint]) -> None:
    """Wait until the idle engines hold no resources for requests and one operator leads; take samples."""
    began = time.monotonic()
    pods = {pod["metadata"]["name"] for endpoint in endpoints for pod in endpoint.pods()}

    def nothing_held() -> bool:
        metrics = watch.look()
        leaders = sum(each.get("stoker_operator_leader", 0) for each in metrics.values())
        return leaders == 1 and pods <= set(metrics) and all(at_rest(metrics[pod]) for pod in pods)

    try:
        wait_for(nothing_held, "an idle system holds nothing", _REST_S)
    except AssertionError:
        metrics = watch.look()
        record.problems.append(f"at rest: { ({pod: metrics.get(pod) for pod in pods}) }")
    record.rests.append(time.monotonic() - began)
    time.sleep(2)  # sleeps: until the server has closed the clients' connections
    watch.look(at_rest=True)


def nothing_twice(site: Site, endpoints: list[Endpoint]) -> Iterator[str]:
    """Yield problems: duplicate or orphaned objects, an old ReplicaSet with pods, more than one Lease, no leader."""
    cluster, namespace = site.cluster, site.endpoint.namespace
    names = sorted(endpoint.name for endpoint in endpoints)
    owners = {endpoint.get()["metadata"]["uid"] for endpoint in endpoints}
    managed = ("--namespace", namespace, "-l", "app.kubernetes.io/managed-by=stoker")
    for kind in ("deployments.apps", "services", "serviceaccounts", "networkpolicies"):
        found = cluster.get(kind, *managed)["items"]
        if sorted(each["metadata"]["name"] for each in found) != names:
            yield f"in the end: {kind} {[each['metadata']['name'] for each in found]}"
        if {owner["uid"] for each in found for owner in each["metadata"].get("ownerReferences", ())} != owners:
            yield f"in the end: {kind} without an owner"
    sets = cluster.get("replicasets", "--namespace", namespace)["items"]
    if len([each for each in sets if each["spec"]["replicas"]]) != len(names):
        yield "in the end: more than one ReplicaSet has pods"
    if len(site.leases()) != 1 or site.leader() is None:
        yield f"in the end: Leases {[lease['metadata']['name'] for lease in site.leases()]}, leader {site.leader()}"


def all_gone(site: Site, endpoints: list[Endpoint]) -> None:
    """Delete the endpoints and wait until none of their objects is left."""
    for endpoint in endpoints:
        endpoint.delete()
    kinds = "deployments,replicasets,pods,services,serviceaccounts,networkpolicies,poddisruptionbudgets,configmaps"
    managed = ("--namespace", site.endpoint.namespace, "-l", "app.kubernetes.io/name=stoker-engine", "-o", "name")
    wait_for(
        tolerating_outage(lambda: not site.cluster.kubectl("get", kinds, *managed).strip()), "nothing is left", 180
    )


@pytest.mark.timeout(MINUTES * 60 * 2 + 1800)
def test_soak(
    cluster: Cluster,
    images: Images,
    chart: None,
    namespace: str,
    pytestconfig: pytest.Config,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    dice = random.Random(SEED)
    workers = cluster.get("nodes", "-l", "!node-role.kubernetes.io/control-plane")["items"]
    assert len(workers) > 1, "the soak drains one of at least two workers"
    sheltered = workers[0]["metadata"]["name"]
    cluster.apply(
        namespace, {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"soak": _KEY}}
    )
    files = tiny_llama(tmp_path_factory.mktemp("model"))
    hub = hubs.start(cluster, namespace, images.client, files)
    struck, steady = endpoints = [Endpoint(cluster, namespace, name) for name in (_STRUCK, _STEADY)]
    struck.apply(struck_manifest())
    steady.apply(steady_manifest(hub.url, sheltered))
    for endpoint in endpoints:
        endpoint.wait_ready(600)
    undisturbed = steady.lives()
    site = Site(cluster, struck, sheltered, dice)

    record = Record(SEED, _STRUCK, time.time())
    end = time.monotonic() + MINUTES * 60

    def say(words: str) -> None:
        print(f"{(time.time() - record.began) / 60:5.1f} min  {words}", flush=True)

    engines = ("stoker.dev/workload=main", "engine", 8000, ("server", "engine"), _KEY)
    operators = ("app.kubernetes.io/name=stoker-operator", "operator", 8080, ("operator", "operator's child"))
    with Watch(cluster, Watched(namespace, *engines), Watched("stoker-system", *operators)) as watch:
        faults, rounds = schedule(dice, "E2E_KUBECONFIG" not in os.environ), max(1, round(MINUTES / _ROUND_MINUTES))
        try:
            for number in range(rounds):
                say(f"round {number + 1} of {rounds}")
                ends = end - (rounds - number - 1) * MINUTES * 60 / rounds
                with traffic_to_both(record, endpoints, images.client, number):
                    while time.monotonic() < ends:
                        struck_by(next(faults), site, record, say)
                        time.sleep(dice.uniform(*_BREATHER_S))  # sleeps: random pause between two faults
                say(record.counted())
                check_at_rest(watch, record, endpoints)
                say(f"at rest after {record.rests[-1]:.1f} s")
        except (AssertionError, pytest.fail.Exception, KeyboardInterrupt) as error:
            record.problems.append(f"given up: {error!r}")
        record.lives = list(watch.lives.values())
    if steady.lives() != undisturbed:
        record.problems.append("the undisturbed pod was replaced or restarted")
    record.problems += nothing_twice(site, endpoints)
    try:
        all_gone(site, endpoints)
    except (AssertionError, pytest.fail.Exception) as error:
        record.problems.append(f"in the end: {error}")

    record.judge()
    results: Path | None = pytestconfig.getoption("results")
    page = record.page(results.with_suffix(".svg").name if results else "soak-results.svg")
    if results:
        results.write_text(page)
        results.with_suffix(".svg").write_text(record.picture())
    print(page)
    assert not record.problems, "\n".join(record.problems)
