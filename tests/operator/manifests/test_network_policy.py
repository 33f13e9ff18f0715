"""Which clients reach an endpoint's pods, by a small interpreter of NetworkPolicy."""

from __future__ import annotations

import ipaddress
from typing import Any, NamedTuple

import pytest

from stoker_operator.api.manifest import parse
from stoker_operator.cli.render import render
from stoker_operator.manifests.network_policy import network_policy
from stoker_operator.objects.facts import MAIN, Child, Endpoint, Key
from stoker_operator.objects.owner import Owner
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.placement import placement_of
from stoker_operator.policy.policy import Policy
from stoker_operator.reconcile.drift import differs
from stoker_operator.reconcile.pinning import pin
from stoker_operator.settings import GatewaySettings
from stoker_operator.workloads.composition import Workload


class Sender(NamedTuple):
    """A client of a pod in namespace default."""

    namespace: str
    labels: tuple[tuple[str, str], ...] = ()
    address: str = "10.1.2.3"


NEIGHBOUR = Sender("default")
STRANGER = Sender("other", (("app", "web"),))
OPERATOR = Sender("stoker-system", (("app.kubernetes.io/name", "stoker-operator"),))
IMPOSTOR = Sender("other", (("app.kubernetes.io/name", "stoker-operator"),))
PROMETHEUS = Sender("monitoring")
OUTSIDE = Sender("", (), "203.0.113.9")

POLICY = Policy.model_validate(
    {
        "networkPolicyFrom": [
            {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "stoker-system"}},
                "podSelector": {"matchLabels": {"app.kubernetes.io/name": "stoker-operator"}},
            },
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
        ]
    }
)
SIDECARS = {
    "spec": {
        "containers": [
            {"name": "engine", "ports": [{"containerPort": 9000}]},
            {"name": "proxy", "image": "p", "ports": [{"containerPort": 8443}]},
        ]
    }
}


def matches(selector: Any, labels: dict[str, str]) -> bool:
    assert not selector.keys() - {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= labels.items()


def is_peer(peer: Any, sender: Sender) -> bool:
    if "ipBlock" in peer:
        inside = [ipaddress.ip_address(sender.address) in ipaddress.ip_network(peer["ipBlock"]["cidr"])]
        left_out = [ipaddress.ip_network(each) for each in peer["ipBlock"].get("except", ())]
        return all(inside) and not any(ipaddress.ip_address(sender.address) in each for each in left_out)
    if not sender.namespace or not matches(peer.get("podSelector", {}), dict(sender.labels)):
        return False
    if "namespaceSelector" not in peer:
        return sender.namespace == "default"
    return matches(peer["namespaceSelector"], {"kubernetes.io/metadata.name": sender.namespace})


def admits(policy: Any, sender: Sender, port: int) -> bool:
    """Return whether the policy admits a connection. Rules without `from` admit all peers, without ports all ports."""
    return any(
        ("ports" not in rule or any(each["port"] == port for each in rule["ports"]))
        and ("from" not in rule or any(is_peer(peer, sender) for peer in rule["from"]))
        for rule in policy["spec"]["ingress"]
    )


def policy_of(document: Any, **spec: Any) -> Any:
    objects = render(parse(document(**spec)), Catalogue.load(), policy=POLICY)
    return next((each for each in objects if each["kind"] == "NetworkPolicy"), None)


FROM = [{"podSelector": {"matchLabels": {"app": "web"}}, "namespaceSelector": {}}]
ADDRESSES = [{"ipBlock": {"cidr": "203.0.113.0/24", "except": ["203.0.113.128/25"]}}]


@pytest.mark.parametrize(
    ("network_policy", "admitted"),
    [
        (None, {NEIGHBOUR, OPERATOR, PROMETHEUS}),
        ({}, {NEIGHBOUR, OPERATOR, PROMETHEUS}),
        ({"mode": "Namespace"}, {NEIGHBOUR, OPERATOR, PROMETHEUS}),
        ({"from": FROM}, {NEIGHBOUR, OPERATOR, PROMETHEUS, STRANGER}),
        ({"from": ADDRESSES}, {NEIGHBOUR, OPERATOR, PROMETHEUS, OUTSIDE}),
        ({"mode": "Open"}, {NEIGHBOUR, OPERATOR, PROMETHEUS, STRANGER, IMPOSTOR, OUTSIDE}),
    ],
)
def test_policy_admits_exactly_the_listed_senders(document: Any, network_policy: Any, admitted: set[Any]) -> None:
    senders = [NEIGHBOUR, STRANGER, OPERATOR, IMPOSTOR, PROMETHEUS, OUTSIDE]
    spec = {} if network_policy is None else {"networkPolicy": network_policy}
    policy = policy_of(document, template=SIDECARS, **spec)
    assert [each for each in senders if admits(policy, each, 8000)] == [each for each in senders if each in admitted]
    for port in (9000, 8443, 22):  # a sidecar's ports are closed, declared or not
        assert not any(admits(policy, each, port) for each in senders), port


def test_gateway_reaches_only_routed_endpoints(document: Any) -> None:
    settings = GatewaySettings("https://models.example.com", "stoker-system", "gateway")
    labels = (("app.kubernetes.io/name", "stoker-gateway"), ("app.kubernetes.io/component", "gateway"))
    gateway = Sender("stoker-system", labels)
    strangers = [STRANGER, IMPOSTOR, OUTSIDE, Sender("other", labels), Sender("stoker-system", labels[:1])]
    owner = Owner("demo", "default", "u")
    for served_by, admitted in ((settings, True), (None, False)):
        policy = network_policy(owner, parse(document()).spec, POLICY, served_by)
        assert admits(policy, gateway, 8000) is admitted
        assert not any(admits(policy, each, 8000) for each in strangers)
        assert not admits(policy, gateway, 9000)
    closed = document(networkPolicy={"mode": "None"})
    assert network_policy(owner, parse(closed).spec, POLICY, settings) is None


def test_mode_none_renders_no_network_policy(document: Any) -> None:
    assert policy_of(document, networkPolicy={"mode": "None"}) is None


def test_policy_selects_the_pods_and_restricts_no_egress(document: Any) -> None:
    objects = {each["kind"]: each for each in render(parse(document()), Catalogue.load(), policy=POLICY)}
    policy = objects["NetworkPolicy"]["spec"]
    assert policy["podSelector"] == objects["Deployment"]["spec"]["selector"]
    assert policy["policyTypes"] == ["Ingress"]


def test_change_of_the_network_policy_restarts_no_pod(document: Any) -> None:
    """Even if a newer operator would render other pods."""

    def pinned(today: Any, live: Any, manifest: Any) -> Any:
        endpoint = Endpoint(Key("default", "demo"), "u", 1, False, manifest, {})
        spec, seen = parse(manifest).spec, {} if live is None else {Child.of(live): live}
        placement = placement_of(spec, Catalogue.load())
        (deployment,) = pin([today], Workload(MAIN, spec), placement, seen, endpoint, "stoker").objects
        return deployment

    (today,) = (each for each in render(parse(document()), Catalogue.load()) if each["kind"] == "Deployment")
    live = pinned(today, None, document())
    container = {"name": "engine", "image": "newer"}
    newer = {**today, "spec": {**today["spec"], "template": {"spec": {"containers": [container]}}}}
    for policy in ({"mode": "Open"}, {"mode": "None"}, {"from": FROM}):
        assert pinned(newer, live, document(networkPolicy=policy))["spec"]["template"] == today["spec"]["template"]
    assert pinned(newer, live, document(engine={"maxNumSeqs": 3}))["spec"]["template"] != today["spec"]["template"]


def test_every_change_of_the_network_policy_is_applied(document: Any) -> None:
    """Missing parts of a rule or peer admit more, so a live policy with extra parts must be changed back."""
    both_selectors = {"podSelector": {"matchLabels": {"a": "b"}}, "namespaceSelector": {"matchLabels": {"c": "d"}}}
    specs = [
        {},
        {"mode": "Open"},
        {"from": [both_selectors]},
        {"from": [{"podSelector": both_selectors["podSelector"]}]},
        {"from": [{"namespaceSelector": both_selectors["namespaceSelector"]}]},
        {"from": [{"podSelector": {"matchLabels": {}}}, {"namespaceSelector": {}}]},
        {"from": ADDRESSES},
        {"from": [{"ipBlock": {"cidr": "203.0.113.0/24", "except": []}}]},
    ]
    policies = [policy_of(document, networkPolicy=each) for each in specs]
    for desired in policies:
        fields = {"f:spec": {"f:podSelector": {}, "f:policyTypes": {}, "f:ingress": {}}}
        managed = {"manager": "stoker", "operation": "Apply", "fieldsV1": fields}
        for other in policies:
            live = {**other, "metadata": {**other["metadata"], "managedFields": [managed]}}
            assert differs(desired, live, "stoker") is (other is not desired)
    assert policies[5]["spec"]["ingress"][0]["from"][-2:] == [{"podSelector": {}}, {"namespaceSelector": {}}]
