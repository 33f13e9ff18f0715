"""Two tenants in two namespaces.

Asserted: the rights of a namespace's user suffice for endpoints there and for nothing elsewhere; the operator can read
only its own Secret; no key or token appears in a log, Event, status or command line; each endpoint has its
NetworkPolicy (kind's network does not enforce it).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from kit.chart import SYSTEM, operator_logs
from kit.cluster import Cluster, Object
from kit.endpoint import Endpoint, demo
from kit.waiting import wait_for

KEY, TOKEN = "sk-the-tenants-own-9c1e", "hf_the-tenants-own-52aa"
USER = "system:serviceaccount:{0}:tenant"


@pytest.fixture
def tenants(cluster: Cluster, chart: None, namespace: str) -> Iterator[tuple[str, str]]:
    """Two namespaces, each with a user who has the chart's role for editing endpoints there."""
    other_namespace = f"{namespace}-b"
    cluster.kubectl("create", "namespace", other_namespace)
    for name in (namespace, other_namespace):
        cluster.kubectl("create", "serviceaccount", "tenant", "--namespace", name)
        role = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": "endpoints"},
            "rules": [
                {
                    "apiGroups": ["stoker.dev"],
                    "resources": ["inferenceendpoints", "inferenceendpoints/scale"],
                    "verbs": ["get", "list", "watch", "create", "update", "patch", "delete"],
                }
            ],
        }
        cluster.apply(name, role)
        cluster.kubectl(
            "create", "rolebinding", "tenant", "--role=endpoints", f"--serviceaccount={name}:tenant", "-n", name
        )
    yield namespace, other_namespace
    cluster.kubectl("delete", "namespace", other_namespace, "--wait=false")


def test_tenant_manages_only_its_own_endpoints(cluster: Cluster, tenants: tuple[str, str]) -> None:
    mine, other = tenants
    me = f"--as={USER.format(mine)}"
    nowhere: Object = {"spec": {"nodeSelector": {"nowhere": "at-all"}}}
    document = json.dumps(demo(template=nowhere))
    cluster.kubectl("apply", "-f", "-", "--namespace", mine, me, stdin=document)
    endpoint = Endpoint(cluster, mine)
    wait_for(lambda: cluster.find("deployment", "demo", "--namespace", mine), "its Deployment", 60)
    cluster.kubectl("scale", "ie/demo", "--replicas=2", "--namespace", mine, me)
    condition = endpoint.wait_reason("Unschedulable", timeout=60)
    assert "nowhere" in condition["message"] or "node" in condition["message"]

    assert "forbidden" in cluster.kubectl("apply", "-f", "-", "--namespace", other, me, stdin=document, check=False)
    assert "forbidden" in cluster.kubectl("get", "ie", "--namespace", other, me, check=False)
    assert "forbidden" in cluster.kubectl("get", "pods", "--namespace", mine, me, check=False)
    policy = cluster.get("networkpolicy", "demo", "--namespace", mine)
    assert policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "demo"
    cluster.kubectl("delete", "ie", "demo", "--namespace", mine, me)


def test_operator_cannot_read_secrets(cluster: Cluster, tenants: tuple[str, str]) -> None:
    operator = f"--as=system:serviceaccount:{SYSTEM}:stoker"
    for verb in ("get", "list", "watch"):
        for where in (tenants[0], "kube-system"):
            answer = cluster.kubectl("auth", "can-i", verb, "secrets", "--namespace", where, operator, check=False)
            assert answer.strip().endswith("no"), (verb, where, answer)
    for verb, resource in (("get", "pods/log"), ("create", "pods/exec"), ("*", "*")):
        answer = cluster.kubectl("auth", "can-i", verb, resource, "--namespace", tenants[0], operator, check=False)
        assert answer.strip().endswith("no"), (verb, resource, answer)


@pytest.mark.timeout(600)
def test_secrets_appear_in_no_log_object_or_command_line(cluster: Cluster, tenants: tuple[str, str]) -> None:
    mine, _ = tenants
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "mine"}, "stringData": {"key": KEY}}
    token = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "stringData": {"token": TOKEN}}
    cluster.apply(mine, secret, token)
    endpoint = Endpoint(cluster, mine)
    variable = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    endpoint.apply(demo(auth={"apiKeysSecretRef": {"name": "mine"}}, engine={"env": [variable]}))
    endpoint.wait_ready()
    (pod,) = (each["metadata"]["name"] for each in endpoint.pods())
    ask = (
        "import urllib.request as r\n"
        f"q = r.Request('http://localhost:8000/v1/models', headers={{'Authorization': 'Bearer {KEY}'}})\n"
        "print(r.urlopen(q).status)\n"
        f"q = r.Request('http://localhost:8000/v1/models', headers={{'Authorization': 'Bearer {TOKEN}'}})\n"
        "try: r.urlopen(q)\n"
        "except r.HTTPError as e: print(e.code)\n"
    )
    assert endpoint.run(pod, ask).split() == ["200", "401"]
    in_namespace = ("--namespace", mine)
    disclosed = {
        "log": cluster.kubectl("logs", pod, *in_namespace),
        "objects": cluster.kubectl(
            "get", "ie,deployments,pods,replicasets,services,events", *in_namespace, "-o", "yaml"
        ),
        "operator": operator_logs(cluster),
        "command line": endpoint.run(pod, "print(open('/proc/1/cmdline').read())"),
    }
    for where, text in disclosed.items():
        assert text, where
        assert KEY not in text, where
        assert TOKEN not in text, where
