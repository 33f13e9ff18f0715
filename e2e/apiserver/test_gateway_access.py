"""Endpoints behind the gateway, with the rights that the chart gives the operator: which endpoints are routed, which
Secrets the gateway may read, and that the operator cannot grant anything else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from kubernetes import client, config

from stoker_operator.cluster.kube import Kube, KubeError

from .operator_process import Operator, check_log

sys.path.insert(0, str(Path(__file__).parent))

from crashing_operator import Death, Life

CHART = Path(__file__).parents[2] / "charts/stoker"
NAME = "routed-stoker"
ROLE = "stoker-gateway"
RBAC = "rbac.authorization.k8s.io"
#: Rights that the audit log does not show: the API server checks them when a Role or a RoleBinding is written.
UNSEEN = {(RBAC, "roles", "escalate"), (RBAC, "roles", "bind")}


class Routed(NamedTuple):
    """An operator with a gateway.

    Attributes:
        operator: the operator, not running yet.
        system: namespace of both.
        tenants: two namespaces that have opted in.
    """

    operator: Operator
    system: str
    tenants: tuple[str, str]


def rendered(helm: str, *options: str) -> list[Any]:
    command = [helm, "template", "routed", CHART, *options]
    return [each for each in yaml.safe_load_all(subprocess.check_output(command, text=True)) if each]


@pytest.fixture
def routed(kube: Any, helm: str, sleeping_operator: Operator, tmp_path: Path) -> Iterator[Routed]:
    sleeping_operator.stop()
    system, *tenants = (f"{prefix}-{uuid.uuid4().hex[:8]}" for prefix in ("system", "red", "blue"))
    for each in (system, *tenants):
        labels = {} if each == system else {"stoker.dev/gateway": "enabled"}
        kube.core.create_namespace({"metadata": {"name": each, "labels": labels}})
    environment = {**os.environ, "KUBECONFIG": str(kube.kubeconfig)}
    options = [f"--namespace={system}", "--set=crds.install=false,webhook.enabled=false,gateway.enabled=true"]
    subprocess.run([helm, "install", "routed", CHART, *options], env=environment, check=True)
    token = kube.core.create_namespaced_service_account_token(NAME, system, {"spec": {"expirationSeconds": 3600}})
    document = yaml.safe_load(kube.kubeconfig.read_text())
    document["users"] = [{"name": each["name"], "user": {"token": token.status.token}} for each in document["users"]]
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(document))
    (deployment,) = (
        each for each in rendered(helm, *options) if (each["kind"], each["metadata"]["name"]) == ("Deployment", NAME)
    )
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    flags = [each for each in container["args"] if each.startswith("--gateway-")]
    yield Routed(Operator(tmp_path / "kubeconfig", tmp_path / "log", *flags), system, (tenants[0], tenants[1]))
    subprocess.run([helm, "uninstall", "routed", options[0]], env=environment, check=True)
    for each in (system, *tenants):
        kube.core.delete_namespace(each)


def keys(secret: str) -> dict[str, Any]:
    return {"apiKeysSecretRef": {"name": secret}}


def names(*served: str) -> dict[str, Any]:
    return {"source": "demo://gemma-3-270m", "servedNames": list(served)}


def reason(kube: Any, ns: str, name: str) -> str:
    return str(kube.condition(ns, name, "Routed").get("reason"))


def has_address(kube: Any, ns: str, name: str) -> bool:
    return "gateway" in {each["name"] for each in kube.endpoint(ns, name)["status"].get("addresses", ())}


def readable(kube: Any, ns: str) -> list[str] | None:
    """Return the Secrets that the Role names; None if there is no Role."""
    try:
        (rule,) = kube.get(f"/apis/{RBAC}/v1/namespaces/{ns}/roles/{ROLE}")["rules"]
    except client.ApiException as error:
        if error.status != 404:
            raise
        return None
    assert (rule["resources"], rule["verbs"]) == (["secrets"], ["get"])
    found: list[str] = rule["resourceNames"]
    return found


def opt(kube: Any, ns: str, value: str | None) -> None:
    kube.core.patch_namespace(ns, {"metadata": {"labels": {"stoker.dev/gateway": value}}})


def may(kube: Any, user: str, verb: str, ns: str, secret: str = "") -> bool:
    about = {"verb": verb, "resource": "secrets", "namespace": ns, "name": secret}
    review = {"spec": {"user": f"system:serviceaccount:{user}", "resourceAttributes": about}}
    return bool(client.AuthorizationV1Api(kube.api).create_subject_access_review(review).status.allowed)


def test_routed_endpoints_and_readable_secrets_follow_the_rules(
    kube: Any, helm: str, routed: Routed, document: Any, eventually: Callable[..., Any]
) -> None:
    operator, system, (red, blue) = routed
    gateway = f"{system}:{NAME}-gateway"
    kube.create(red, document("first", model=names("gemma", "g"), auth=keys("red-keys")))
    eventually(lambda: kube.endpoint(red, "first")["metadata"]["creationTimestamp"], "it is there")
    with operator:
        eventually(lambda: reason(kube, red, "first") == "Routed" and has_address(kube, red, "first"), "it is served")
        pods = kube.deployment(red, "first")["spec"]["template"]
        kube.create(blue, document("second", model=names("gemma"), auth=keys("blue-keys")))
        eventually(lambda: reason(kube, blue, "second") == "NameTaken", "its name is taken")
        message = kube.condition(blue, "second", "Routed")["message"]
        assert "gemma" in message and red not in message and "first" not in message
        assert not has_address(kube, blue, "second")

        eventually(lambda: may(kube, gateway, "get", red, "red-keys"), "the gateway may read the keys")
        assert not may(kube, gateway, "get", red, "others") and not may(kube, gateway, "list", red)
        assert not may(kube, gateway, "get", blue, "blue-keys") and readable(kube, blue) is None
        assert not may(kube, f"{system}:{NAME}", "get", red, "red-keys"), "the operator reads none"

        kube.create(red, document("third", model=names("other"), auth=keys("more-keys")))
        eventually(lambda: readable(kube, red) == ["more-keys", "red-keys"], "the Role has grown")
        kube.patch(red, "third", {"routing": {"gateway": "Disabled"}})
        eventually(lambda: readable(kube, red) == ["red-keys"], "the Role has shrunk")

        rights = client.RbacAuthorizationV1Api(kube.api)
        thief = [{"op": "add", "path": "/subjects/-", "value": {"kind": "User", "name": "thief", "apiGroup": RBAC}}]
        rights.patch_namespaced_role_binding(ROLE, red, thief)

        def put_out() -> bool:
            subjects = rights.read_namespaced_role_binding(ROLE, red).subjects
            return [each.name for each in subjects] == [f"{NAME}-gateway"]

        eventually(put_out, "the added subject is removed")

        opt(kube, red, None)
        eventually(lambda: reason(kube, blue, "second") == "Routed", "the name passes to the next endpoint")
        eventually(
            lambda: reason(kube, red, "first") == "Disabled" and readable(kube, red) is None, "red is not routed"
        )
        kube.patch(red, "first", {"routing": {"gateway": "Enabled"}})
        eventually(lambda: reason(kube, red, "first") == "NamespaceNotOptedIn", "its namespace has not opted in")
        opt(kube, red, "enabled")
        eventually(lambda: reason(kube, red, "first") == "Routed", "the older one has its name back")
        eventually(
            lambda: readable(kube, blue) is None and readable(kube, red) == ["red-keys"], "and its keys are readable"
        )
        # The last writes: the RoleBinding follows its Role, and the other endpoint is reconciled by itself.
        eventually(lambda: may(kube, gateway, "get", red, "red-keys"), "the RoleBinding is back")
        eventually(lambda: reason(kube, blue, "second") == "NameTaken", "the younger one has lost the name")
        assert kube.deployment(red, "first")["spec"]["template"] == pods, "no pod was replaced"

    before = kube.writes(red), kube.writes(blue)
    with operator:
        eventually(lambda: operator.reconciles() >= 3, "it has reconciled all endpoints")
    assert (kube.writes(red), kube.writes(blue)) == before, "a restart writes nothing"

    kube.delete(red, "first")  # while no operator runs
    opt(kube, blue, None)
    opt(kube, blue, "enabled")
    with operator:
        eventually(lambda: reason(kube, blue, "second") == "Routed", "the name has passed to the next endpoint")
        eventually(
            lambda: readable(kube, red) is None and readable(kube, blue) == ["blue-keys"], "and the access to its keys"
        )
    assert sorted(used(kube, f"system:serviceaccount:{system}:{NAME}")) == sorted(granted(helm) - UNSEEN)


@pytest.mark.timeout(600)
def test_next_operator_completes_a_half_granted_access(
    kube: Any, routed: Routed, document: Any, eventually: Callable[..., Any], tmp_path: Path
) -> None:
    operator, _, (red, _) = routed
    kube.create(red, document("first", auth=keys("red-keys"), routing={"gateway": "Disabled"}))

    def live(number: int, death: Death | None) -> Life:
        return Life(operator.kubeconfig, "", tmp_path / f"{number}.log", death, operator.options)

    def bound() -> bool:
        found = client.RbacAuthorizationV1Api(kube.api).list_namespaced_role_binding(red).items
        return ROLE in {each.metadata.name for each in found}

    opened, closed = ("apply Role", "apply RoleBinding"), ("delete RoleBinding", "delete Role")
    deaths = [
        Death(moment, writes[number])
        for moment in ("before", "after")
        for number in (0, 1)
        for writes in (opened, closed)
    ]
    for number, death in enumerate(deaths):
        is_open = death.write in opened
        kube.patch(red, "first", {"routing": {"gateway": "Enabled" if is_open else "Disabled"}})
        mortal = live(2 * number, death)
        try:
            assert mortal.died(120), f"the operator is alive, but should have died {death}:\n{mortal.log.read_text()}"
        finally:
            mortal.kill()
        heir = live(2 * number + 1, None)
        try:
            expected = (["red-keys"], True) if is_open else (None, False)
            eventually(
                lambda expected=expected: (readable(kube, red), bound()) == expected, f"expected rights, {death}"
            )
            expected_reason = "Routed" if is_open else "Disabled"
            eventually(
                lambda expected_reason=expected_reason: reason(kube, red, "first") == expected_reason,
                f"the failure is reported, {death}",
            )
        finally:
            heir.kill()
        for life in (mortal, heir):
            check_log(life.log)


def used(kube: Any, account: str) -> set[tuple[str, str, str]]:
    """Return (group, resource, verb) of an account's requests about namespaces and RBAC."""
    found = set()
    for event in kube.server.requests():
        about = event.get("objectRef", {})
        if event["user"]["username"] != account or about.get("resource") not in ("namespaces", "roles", "rolebindings"):
            continue
        found.add((about.get("apiGroup", ""), about["resource"], event["verb"]))
        if event["verb"] == "patch" and event["responseStatus"]["code"] == 201:
            found.add((about["apiGroup"], about["resource"], "create"))
    return found


def granted(helm: str) -> set[tuple[str, str, str]]:
    """Return (group, resource, verb) of the rights that the operator has only with a gateway."""

    def of(*options: str) -> set[tuple[str, str, str]]:
        (role,) = (
            each
            for each in rendered(helm, *options)
            if (each["kind"], each["metadata"]["name"]) == ("ClusterRole", NAME)
        )
        return {
            (group, resource, verb)
            for rule in role["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }

    return of("--set=gateway.enabled=true") - of()


def test_operator_may_grant_access_by_one_name_only(kube: Any, routed: Routed) -> None:
    _, _, (red, _) = routed
    api = Kube(config.new_client_from_config(str(routed.operator.kubeconfig)))

    def refused(body: dict[str, Any]) -> bool:
        try:
            api.apply({"apiVersion": f"{RBAC}/v1", **body}, "stoker")
        except KubeError as error:
            assert error.status == 403, error
            return True
        return False

    def role(name: str) -> dict[str, Any]:
        rule = {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["a"], "verbs": ["get"]}
        return {"kind": "Role", "metadata": {"name": name, "namespace": red}, "rules": [rule]}

    def binding(name: str, kind: str, to: str) -> dict[str, Any]:
        return {
            "kind": "RoleBinding",
            "metadata": {"name": name, "namespace": red},
            "roleRef": {"apiGroup": RBAC, "kind": kind, "name": to},
            "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": red}],
        }

    rights = client.RbacAuthorizationV1Api(kube.api)
    assert refused(role("another"))
    rights.create_namespaced_role(red, role("another"))
    rights.create_namespaced_role(red, role(ROLE))
    assert refused(role("another"))
    assert refused(binding("another", "Role", ROLE))
    assert refused(binding(ROLE, "Role", "another"))
    assert refused(binding(ROLE, "ClusterRole", "cluster-admin"))
    rights.delete_namespaced_role(ROLE, red)
    assert not refused(role(ROLE))
    assert not refused(binding(ROLE, "Role", ROLE))


def test_gateway_requires_an_operator_of_all_namespaces(helm: str) -> None:
    command = [helm, "template", "routed", CHART, "--set=gateway.enabled=true,watchNamespaces={a}"]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode != 0
    assert "gateway.enabled requires an operator that watches all namespaces" in failed.stderr
