"""Faults and changes during traffic, one at a time, in a seeded random order.

A gentle fault fails no request. A harsh one kills or freezes an engine: requests in flight on its pod fail. If the
pod's server dies too, requests that the Service still routes there fail until its endpoints are updated; if the server
survives and restarts the engine, no others fail.

After each fault, everything must recover before the next one (`Site.wait_recovered`), and a change of an endpoint must
take effect, which detects an operator that only seems to work.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from kit.chart import SYSTEM
from kit.cluster import Cluster, Object
from kit.controllers import controllers_live
from kit.endpoint import Endpoint
from kit.waiting import wait_for

T = TypeVar("T")

REPLICAS = 2
#: Time until a Service stops routing to a failed pod, in seconds: twice that of under_traffic/test_pod_death.py.
HEARSAY = 12
#: Longest time until a pod whose engine hangs is reported as not ready, in seconds.
NOTICED = 20
#: Time for full recovery, in seconds. It includes loading three models on two CPUs.
RECOVERY = 420
_ETCD_PAUSE = 15


@dataclass
class Site:
    """Target of the faults.

    Attributes:
        endpoint: the endpoint whose pods are hit; it has `REPLICAS` pods.
        sheltered: node that is never drained.
        dice: random generator that selects targets.
    """

    cluster: Cluster
    endpoint: Endpoint
    sheltered: str
    dice: random.Random
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def next_number(self) -> int:
        """Return a number that has not been used."""
        return next(self._numbers)

    @property
    def control_plane(self) -> str:
        """Return the name of the API server's node."""
        (node,) = self.cluster.get("nodes", "-l", "node-role.kubernetes.io/control-plane")["items"]
        name: str = node["metadata"]["name"]
        return name

    def operator_pods(self) -> list[Object]:
        """Return the operator's pods, including terminating ones."""
        which = ("--namespace", SYSTEM, "-l", "app.kubernetes.io/name=stoker-operator")
        found: list[Object] = self.cluster.get("pods", *which)["items"]
        return found

    def leases(self) -> list[Object]:
        """Return the Leases in the operator's namespace."""
        found: list[Object] = self.cluster.get("leases", "--namespace", SYSTEM)["items"]
        return found

    def leader(self) -> str | None:
        """Return the operator's leading pod; None if no existing pod leads."""
        (lease,) = self.leases()
        holder = (lease["spec"].get("holderIdentity") or "").partition("_")[0]
        names = {pod["metadata"]["name"] for pod in self.operator_pods()}
        return holder if holder in names else None

    def model_pods(self) -> list[Object]:
        """Return the endpoint's pods, including terminating ones."""
        which = ("--namespace", self.endpoint.namespace, "-l", f"app.kubernetes.io/instance={self.endpoint.name}")
        found: list[Object] = self.cluster.get("pods", *which)["items"]
        return found

    def all_is_well(self) -> bool:
        """Return whether nodes, operator and endpoint are in their desired state, without ongoing changes."""
        nodes = self.cluster.get("nodes")["items"]
        operator = self.cluster.get("deployment", "stoker", "--namespace", SYSTEM)
        return (
            all(_condition(node, "Ready") and not node["spec"].get("unschedulable") for node in nodes)
            and operator["status"].get("readyReplicas") == operator["spec"]["replicas"] == REPLICAS
            and len(self.operator_pods()) == REPLICAS
            and self.leader() is not None
            and self.endpoint.ready() is not None
            and len(self.model_pods()) == len(self.endpoint.serving()) == REPLICAS
        )

    def wait_recovered(self) -> None:
        """Wait until everything has recovered and a change takes effect.

        Raises:
            AssertionError: that takes too long.
        """
        note, began = f"turn-{self.next_number()}", time.time()

        def changed() -> bool:
            self.endpoint.patch(service={"annotations": {"example.com/soak": note}})
            return True

        def arrived() -> bool:
            service = self.cluster.get("service", self.endpoint.name, "--namespace", self.endpoint.namespace)
            return bool(service["metadata"].get("annotations", {}).get("example.com/soak") == note)

        wait_for(tolerating_outage(changed), "the API server accepts a change", RECOVERY)
        wait_for(tolerating_outage(arrived), "the change arrives", RECOVERY)
        # Without the controllers, a deleted pod may seem to serve.
        wait_for(tolerating_outage(lambda: controllers_live(self.cluster, began)), "the controllers run", RECOVERY)
        wait_for(tolerating_outage(self.all_is_well), "all parts are in their desired state", RECOVERY)

    def struck_pod(self) -> str:
        """Return the name of a random pod of the endpoint."""
        name: str = self.dice.choice(self.endpoint.pods())["metadata"]["name"]
        return name


@dataclass(frozen=True)
class Blow:
    """A harsh fault that happened; times in seconds since 1970.

    Attributes:
        struck: requests that started before this may have been in flight.
        heard: requests that started before this may have been routed to a server that was down.
    """

    struck: float
    heard: float


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        strike: triggers it. Returns the blow of a harsh fault, or None.
        restarts: whether pods of the endpoint may be replaced or restarted.
        needs_root: whether it needs root on a node, which only clusters made by these tests permit.
    """

    name: str
    strike: Callable[[Site], Blow | None]
    restarts: bool = False
    needs_root: bool = False


def tolerating_outage(look: Callable[[], T | None]) -> Callable[[], T | None]:
    """Return `look` with errors of an unavailable API server turned into None."""

    def look_or_none() -> T | None:
        try:
            return look()
        except (pytest.fail.Exception, ValueError, KeyError):  # kubectl failed, or its output was incomplete
            return None

    return look_or_none


def _pod_deleted(site: Site) -> None:
    pod = site.struck_pod()
    site.cluster.kubectl("delete", "pod", pod, "--namespace", site.endpoint.namespace, "--wait=false")
    wait_for(tolerating_outage(lambda: pod not in _names(site.endpoint.pods())), "it is ending", 60)


def _engine_signalled(site: Site, signal: str) -> Blow:
    pod = site.struck_pod()
    address = next(each["status"]["podIP"] for each in site.endpoint.pods() if each["metadata"]["name"] == pod)
    lives = site.endpoint.lives()
    site.endpoint.signal_engine(pod, signal)
    struck = time.time()

    def is_noticed() -> bool:
        return address not in site.endpoint.serving() or site.endpoint.lives() != lives

    with contextlib.suppress(AssertionError):  # evaluated later, by the clients' results
        wait_for(tolerating_outage(is_noticed), "the fault is detected", NOTICED, every=0.5)
    return Blow(struck, time.time() + HEARSAY)


def _engine_killed(site: Site) -> Blow:
    return _engine_signalled(site, "SIGKILL")


def _engine_frozen(site: Site) -> Blow:
    """Recovery means that the server responds again: its pod may still count as ready for a moment."""
    blow = _engine_signalled(site, "SIGSTOP")
    wait_for(tolerating_outage(lambda: len(site.endpoint.serving()) == REPLICAS), "it serves again", RECOVERY)
    return blow


def _operator_deleted(site: Site) -> None:
    pod = site.dice.choice(sorted(_names(site.operator_pods())))
    site.cluster.kubectl("delete", "pod", pod, "--namespace", SYSTEM)


def _leader_killed(site: Site) -> None:
    leader = site.leader()
    assert leader, "no operator leads"
    site.cluster.kubectl("delete", "pod", leader, "--namespace", SYSTEM, "--grace-period=0", "--force")
    wait_for(tolerating_outage(lambda: leader != site.leader() is not None), "another one leads", 120)


def _api_server_killed(site: Site) -> None:
    site.cluster.on_node(site.control_plane, "pkill", "-KILL", "-f", "^kube-apiserver")


def _etcd_paused(site: Site) -> None:
    """Simulate a disk that does not respond."""
    node = site.control_plane
    site.cluster.on_node(node, "pkill", "-STOP", "-f", "^etcd")
    try:
        time.sleep(_ETCD_PAUSE)  # sleeps: duration of the disk's outage
    finally:
        site.cluster.on_node(node, "pkill", "-CONT", "-f", "^etcd")


def _webhook_down(site: Site) -> None:
    """Run no operator: objects written meanwhile are accepted, and reconciled later."""
    in_namespace = ("--namespace", SYSTEM)
    site.cluster.kubectl("scale", "deployment/stoker", "--replicas=0", *in_namespace)
    try:
        wait_for(tolerating_outage(lambda: not site.operator_pods()), "the operators have ended", 120)
        site.endpoint.patch(service={"annotations": {"example.com/unseen": f"turn-{site.next_number()}"}})
    finally:
        site.cluster.kubectl("scale", "deployment/stoker", f"--replicas={REPLICAS}", *in_namespace)


def _node_drained(site: Site) -> None:
    """Drain a worker that is not sheltered, preferably one with model pods."""
    nodes = [pod["spec"]["nodeName"] for pod in site.endpoint.pods()]
    other_nodes = [
        each["metadata"]["name"]
        for each in site.cluster.get("nodes", "-l", "!node-role.kubernetes.io/control-plane")["items"]
        if each["metadata"]["name"] != site.sheltered
    ]
    node = next((node for node in nodes if node in other_nodes), other_nodes[0])
    how = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", f"--timeout={RECOVERY}s")
    try:
        site.cluster.kubectl("drain", node, *how)
    finally:
        site.cluster.kubectl("uncordon", node)


def _scaled(site: Site) -> None:
    site.endpoint.patch(replicas=REPLICAS + 1)
    wait_for(tolerating_outage(lambda: len(site.endpoint.serving()) == REPLICAS + 1), "one more pod serves", RECOVERY)
    site.endpoint.patch(replicas=REPLICAS)
    wait_for(tolerating_outage(lambda: len(site.model_pods()) == REPLICAS), "the additional pod is removed", RECOVERY)


def _rolled_out(site: Site, **spec: Any) -> None:
    before = _names(site.endpoint.pods())
    site.endpoint.patch(**spec)
    wait_for(tolerating_outage(lambda: not before & _names(site.model_pods())), "all pods are new ones", RECOVERY)


def _flag_changed(site: Site) -> None:
    _rolled_out(site, engine={"maxNumSeqs": 8 + site.next_number()})


def _label_changed(site: Site) -> None:
    _rolled_out(site, template={"metadata": {"labels": {"example.com/soak": f"turn-{site.next_number()}"}}})


FAULTS = (
    Fault("pod deleted", _pod_deleted, restarts=True),
    Fault("engine SIGKILLed", _engine_killed, restarts=True),
    Fault("engine frozen", _engine_frozen, restarts=True),
    Fault("operator pod deleted", _operator_deleted),
    Fault("leading operator killed", _leader_killed),
    Fault("API server killed", _api_server_killed, needs_root=True),
    Fault(f"etcd paused for {_ETCD_PAUSE} s", _etcd_paused, needs_root=True),
    Fault("no operator, no webhook", _webhook_down),
    Fault("node drained", _node_drained, restarts=True),
    Fault("scaled to 3 and back", _scaled, restarts=True),
    Fault("rolling change: maxNumSeqs", _flag_changed, restarts=True),
    Fault("rolling change: a label", _label_changed, restarts=True),
)


def schedule(dice: random.Random, nodes_are_ours: bool = True) -> Iterator[Fault]:
    """Yield faults endlessly: each once in random order, then again."""
    possible = [fault for fault in FAULTS if nodes_are_ours or not fault.needs_root]
    while True:
        yield from dice.sample(possible, len(possible))


def _names(pods: list[Object]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


def _condition(thing: Object, kind: str) -> bool:
    return any(each["type"] == kind and each["status"] == "True" for each in thing["status"].get("conditions", ()))
