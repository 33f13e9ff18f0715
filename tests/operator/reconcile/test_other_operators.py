"""Two operators with the same endpoint: one serves it, the other stands back, and writes end."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from stoker_operator.cluster.informer import Informer
from stoker_operator.cluster.kube import KubeError
from stoker_operator.manifests.gateway_access import NAME
from stoker_operator.objects.facts import Key
from stoker_operator.objects.owner import OPERATOR, operator_of
from stoker_operator.policy.policy import Policy
from stoker_operator.reconcile.cluster import Cluster
from stoker_operator.reconcile.gateway_rbac import grant
from stoker_operator.reconcile.other_operators import OtherOperators
from stoker_operator.reconcile.reconcile import Outcome, reconcile
from stoker_operator.settings import GatewaySettings

from .fake_cluster import KEY, NOON, FakeKube, World

LABELS = {"app.kubernetes.io/name": "stoker-operator"}


class Namespaces(FakeKube):
    """Adds the Deployments of operators, by namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: dict[str, dict[str, Any]] = {}
        self.forbidden: set[str] = set()

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        if namespace in ("a", "b"):
            self.requests.append(f"get operator {namespace}")
            if namespace in self.forbidden:
                raise KubeError(403, "forbidden")
            return self.operators.get(namespace)
        return super().get(kind, namespace, name)


class Operator:
    """An operator called NAMESPACE/stoker, with its own store."""

    def __init__(self, world: World, namespace: str) -> None:
        self.world, self.name = world, f"{namespace}/stoker"
        self.now = 0.0
        self.restart()

    def restart(self) -> None:
        self.operators = OtherOperators(self.world.kube, self.name, lambda: self.now)

    def reconcile(self) -> tuple[Outcome, list[str]]:
        """Reconcile with the current state of the cluster; return the outcome and the writes."""
        self.now += 60
        self.world.restart()
        cluster = Cluster(self.world.kube, self.world.store, self.world.cluster.writer, operators=self.operators)
        outcome = reconcile(cluster, self.world.context, KEY, NOON)
        return outcome, [each for each in self.world.kube.requests if each.split()[0] in ("apply", "delete", "create")]


def installed(replicas: int = 2, labels: dict[str, str] = LABELS) -> dict[str, Any]:
    return {"kind": "Deployment", "metadata": {"name": "stoker", "labels": labels}, "spec": {"replicas": replicas}}


@pytest.fixture
def world(document: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("tests.operator.reconcile.fake_cluster.FakeKube", Namespaces)
    return World(document())


def record(world: World) -> str:
    return operator_of(world.kube.objects["Deployment", "demo"])


def test_second_operator_yields_to_the_first(world: World, caplog: pytest.LogCaptureFixture) -> None:
    first, second = Operator(world, "a"), Operator(world, "b")
    world.kube.operators["a"] = installed()
    first.reconcile()
    assert record(world) == "a/stoker"
    for _ in range(3):
        assert second.reconcile() == (Outcome.YIELDED, [])
    (line,) = (each.message for each in caplog.records if each.levelname == "WARNING")
    assert "the operator a/stoker also watches" in line and "watchNamespaces" in line
    assert first.reconcile() == (Outcome.MOVING, [])


@pytest.mark.parametrize(
    "there",
    [
        None,
        installed(0),
        installed(labels={}),
        {**installed(), "metadata": {"labels": LABELS, "deletionTimestamp": "x"}},
    ],
    ids=["uninstalled", "scaled down", "another Deployment", "being deleted"],
)
def test_endpoint_of_a_removed_operator_is_taken_over(world: World, there: Any) -> None:
    first, second = Operator(world, "a"), Operator(world, "b")
    world.kube.operators["a"] = installed()
    first.reconcile()
    assert second.reconcile()[0] is Outcome.YIELDED
    world.kube.operators["a"] = there
    assert second.reconcile() == (Outcome.MOVING, ["apply Deployment"])
    assert record(world) == "b/stoker"
    assert second.reconcile() == (Outcome.MOVING, [])


def test_operator_without_a_name_yields_too(world: World) -> None:
    world.kube.operators["a"] = installed()
    Operator(world, "a").reconcile()
    nameless = Operator(world, "b")
    nameless.operators = OtherOperators(world.kube, "", lambda: nameless.now)
    assert nameless.reconcile() == (Outcome.YIELDED, [])
    world.kube.operators.clear()
    assert nameless.reconcile()[0] is Outcome.MOVING


@pytest.mark.parametrize("named", ["", "/", "a", "a/", "/stoker"])
def test_malformed_operator_name_is_replaced(world: World, named: str) -> None:
    operator = Operator(world, "b")
    operator.reconcile()
    live = world.kube.objects["Deployment", "demo"]
    live["metadata"]["annotations"][OPERATOR] = named
    operator.restart()
    operator.reconcile()
    assert record(world) == "b/stoker"


def test_failed_lookup_of_the_other_operator_is_an_error(world: World) -> None:
    Operator(world, "a").reconcile()
    second = Operator(world, "b")

    def fails(*_: Any) -> Any:
        raise KubeError(503, "busy")

    second.operators._kube = type("Busy", (), {"get": fails})()  # type: ignore[assignment]
    with pytest.raises(KubeError, match="busy"):
        second.reconcile()
    assert record(world) == "a/stoker"


@pytest.mark.parametrize("seed", range(40))
def test_random_operators_stop_writing_and_one_serves(world: World, seed: int) -> None:
    """However operators see each other, and whenever they reconcile, restart or are uninstalled, their writes end and
    one of them serves: a remaining one after its next restart at the latest.
    """
    rng = random.Random(seed)
    running = {name: Operator(world, name) for name in ("a", "b")}
    for name in running:
        seen = rng.choice(["seen", "forbidden", "no Deployment"])
        if seen == "seen":
            world.kube.operators[name] = installed()
        if seen == "forbidden":
            world.kube.forbidden.add(name)
    for _ in range(rng.randrange(12)):
        operator = running[rng.choice("ab")]
        operator.reconcile()
        if rng.random() < 0.2:
            operator.restart()
    if rng.random() < 0.5:
        removed = rng.choice("ab")
        del running[removed]
        world.kube.operators.pop(removed, None)
    for _ in range(3):
        for operator in running.values():
            operator.reconcile()
    serving = record(world)
    outcomes = {operator.name: operator.reconcile() for operator in running.values()}
    assert not any(written for _, written in outcomes.values())
    assert {name for name, (outcome, _) in outcomes.items() if outcome is not Outcome.YIELDED} <= {serving}
    if len(running) == 2:
        assert serving in outcomes
        return
    (remaining,) = running.values()
    remaining.restart()
    remaining.reconcile()
    assert record(world) == remaining.name


def test_gateway_access_is_granted_by_one_operator(world: World) -> None:
    world.kube.operators["a"] = installed()

    def granted(name: str, secrets: tuple[str, ...]) -> tuple[Outcome, list[str]]:
        world.restart()
        Informer(world.kube, world.store, gateway=True).relist()
        gateway = GatewaySettings("https://g", name, "g")
        operators = OtherOperators(world.kube, f"{name}/stoker")
        outcome = grant(world.kube, world.store, world.cluster.writer, "default", secrets, gateway, operators)
        return outcome, [each for each in world.kube.requests if each.split()[0] in ("apply", "delete")]

    assert granted("a", ("keys",)) == (Outcome.SETTLED, ["apply Role", "apply RoleBinding"])
    assert operator_of(world.kube.objects["RoleBinding", NAME]) == "a/stoker"
    assert granted("b", ("keys",)) == granted("b", ()) == (Outcome.YIELDED, [])
    world.kube.operators.clear()
    assert granted("b", ()) == (Outcome.GONE, ["delete RoleBinding", "delete Role"])


def test_operators_that_refuse_an_endpoint_differently_stop_writing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    spec = {**world.document["spec"], "template": {"spec": {"hostNetwork": True}}}
    world.kube.seen({**world.document, "metadata": {**world.document["metadata"], "uid": "u"}, "spec": spec})
    pair = {"Restricted": Operator(world, "a"), "None": Operator(world, "b")}
    context = world.context

    def written(rounds: int) -> int:
        count = 0
        for _ in range(rounds):
            for template, operator in pair.items():
                world.context = dataclasses.replace(context, policy=Policy(template=template))
                operator.now -= 60
                count += len([each for each in operator.reconcile()[1] if each.startswith("apply")])
        return count

    assert 2 <= written(6) <= 7
    assert written(6) == 0
    assert len([each for each in caplog.records if "replacing the status" in each.message]) == 1
    pair["Restricted"].now += 601
    assert written(1) == 1, "the other operator may be gone"


def test_a_status_that_could_not_be_written_does_not_count(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Operator(world, "a")

    def fails(*_: Any, **__: Any) -> Any:
        raise KubeError(503, "busy")

    with monkeypatch.context() as patch:
        patch.setattr(world.kube, "apply", fails)
        for _ in range(9):
            with pytest.raises(KubeError):
                operator.reconcile()
    assert operator.reconcile()[1][-2:] == ["apply InferenceEndpoint/status", "create Event RollingOut"]


def test_deleted_endpoint_is_forgotten(world: World) -> None:
    operator = Operator(world, "a")
    operator.reconcile()
    operator.reconcile()
    assert operator.operators._served == {KEY}
    operator.operators.forget(Key(*KEY))
    assert not operator.operators._served
