"""The gateway's rights in a namespace are exactly what its endpoints need; other objects are never changed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from stoker_operator.cluster.kube import KubeError
from stoker_operator.cluster.store import Store
from stoker_operator.manifests.gateway_access import NAME, gateway_access
from stoker_operator.objects.owner import INSTANCE, MANAGED_BY
from stoker_operator.reconcile.apply import MANAGER, Writer
from stoker_operator.reconcile.gateway_rbac import KINDS, grant, namespaces
from stoker_operator.reconcile.reconcile import Outcome
from stoker_operator.settings import GatewaySettings

GATEWAY = GatewaySettings("https://models.example.com", "stoker-system", "stoker-gateway")


class FakeKube:
    """Stores objects like the API server."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.writes: list[str] = []
        self.version = 0
        self.refuses = False

    def get(self, kind: str, namespace: str, name: str) -> Any:
        return self.objects.get(kind)

    def apply(self, body: Any, manager: str, subresource: str = "", *, dry_run: bool = False) -> Any:
        if self.refuses:
            raise KubeError(403, "not here")
        self.writes.append(f"apply {body['kind']}")
        return self.put(body)

    def put(self, body: Any) -> Any:
        self.version += 1
        metadata = {**body["metadata"], "resourceVersion": str(self.version), "uid": f"{body['kind']}{self.version}"}
        self.objects[body["kind"]] = {**body, "metadata": metadata}
        return self.objects[body["kind"]]

    def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        self.writes.append(f"delete {kind}")
        del self.objects[kind]


class World:
    """The fake, and the code that grants rights."""

    def __init__(self) -> None:
        self.kube: Any = FakeKube()
        self.restart()

    def restart(self) -> None:
        self.store = Store(MANAGER, INSTANCE)
        for each in self.kube.objects.values():
            if (each["metadata"].get("labels") or {}).items() >= MANAGED_BY.items():
                self.store.put(each)

    def grant(self, *secrets: str, gateway: GatewaySettings = GATEWAY) -> tuple[Outcome, list[str]]:
        self.kube.writes.clear()
        writer = Writer(self.kube, self.store)
        return grant(self.kube, self.store, writer, "ns", secrets, gateway), list(self.kube.writes)

    def tamper(self, kind: str, **parts: Any) -> None:
        self.store.put(self.kube.put({**self.kube.objects[kind], **parts}))


def test_role_follows_the_needed_secrets() -> None:
    world = World()
    assert world.grant() == (Outcome.GONE, [])
    assert world.grant("a") == (Outcome.SETTLED, ["apply Role", "apply RoleBinding"])
    assert namespaces(world.store) == {"ns"}
    world.restart()
    assert world.grant("a") == (Outcome.SETTLED, []), "a restart writes nothing"
    assert world.grant("a", "b") == (Outcome.SETTLED, ["apply Role"])
    (rule,) = world.kube.objects["Role"]["rules"]
    assert rule == {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["a", "b"], "verbs": ["get"]}
    assert world.grant("b")[1] == ["apply Role"]
    moved_gateway = GatewaySettings(GATEWAY.url, "elsewhere", "gateway")
    assert world.grant("b", gateway=moved_gateway)[1] == ["apply RoleBinding"]
    assert world.grant() == (Outcome.GONE, ["delete RoleBinding", "delete Role"])
    assert world.kube.objects == {}
    assert namespaces(world.store) == set()


def test_foreign_subjects_and_rules_are_removed() -> None:
    world = World()
    world.grant("a")
    binding, role = world.kube.objects["RoleBinding"], world.kube.objects["Role"]
    thief = {"kind": "ServiceAccount", "name": "thief", "namespace": "ns"}
    world.tamper("RoleBinding", subjects=[*binding["subjects"], thief])
    assert world.grant("a")[1] == ["apply RoleBinding"]
    world.tamper("Role", rules=[*role["rules"], {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}])
    assert world.grant("a")[1] == ["apply Role"]


@pytest.mark.parametrize("kind", KINDS)
def test_objects_of_other_owners_are_left_alone(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.kube.put({"kind": kind, "metadata": {"name": NAME, "namespace": "ns"}})
    assert world.grant("a") == (Outcome.REFUSED, [])
    assert f"{kind} {NAME} was not created by Stoker" in caplog.text
    assert world.grant() == (Outcome.GONE, [])


def test_refused_write_is_logged_and_retried(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.kube.refuses = True
    assert world.grant("a") == (Outcome.REFUSED, [])
    assert "not here" in caplog.text
    world.kube.refuses = False
    assert world.grant("a")[0] is Outcome.SETTLED


def test_access_equals_the_current_need_after_any_history() -> None:
    chance, world = random.Random(5), World()
    for _ in range(200):
        secrets = sorted(chance.sample(["a", "b", "c", "d"], chance.randint(0, 4)))
        if world.kube.objects and chance.random() < 0.2:  # the writer died half-way, or a user deleted it
            kind = chance.choice(sorted(world.kube.objects))
            world.store.remove(world.kube.objects.pop(kind))
        if chance.random() < 0.2:
            world.restart()
        world.grant(*secrets)
        expected = {each["kind"]: each for each in gateway_access("ns", secrets, GATEWAY)}
        assert expected.keys() == world.kube.objects.keys()
        for kind, each in expected.items():
            assert each.keys() - {"metadata"} <= world.kube.objects[kind].keys()
            assert all(world.kube.objects[kind][part] == each[part] for part in each.keys() - {"metadata"})
