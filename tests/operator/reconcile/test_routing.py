"""Which endpoints the gateway serves, compared with a simple implementation of the rules, over random histories."""

from __future__ import annotations

import random
from typing import Any

import pytest

from stoker_operator.objects.facts import Key
from stoker_operator.reconcile.routing import OPT_IN, Routes
from stoker_operator.settings import GatewaySettings

GATEWAY = GatewaySettings("https://models.example.com", "stoker-system", "stoker-gateway")
LABEL, VALUE = OPT_IN


def namespace(name: str, *, opted_in: bool = True, **metadata: Any) -> dict[str, Any]:
    labels = {LABEL: VALUE} if opted_in else {LABEL: "Enabled"}
    return {"kind": "Namespace", "metadata": {"name": name, "labels": labels, **metadata}}


def endpoint(created: int, *names: str, gateway: str = "", secret: str = "", **metadata: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {"model": {"source": "demo://gemma-3-270m"}}
    spec["model"] |= {"servedNames": list(names)} if names else {}
    spec |= {"routing": {"gateway": gateway}} if gateway else {}
    spec |= {"auth": {"apiKeysSecretRef": {"name": secret}}} if secret else {}
    return {"metadata": {"creationTimestamp": f"2026-01-01T00:00:{created:02}Z", **metadata}, "spec": spec}


def reason(routes: Routes, key: Key) -> str:
    route = routes.of(key)
    return route.reason if route else ""


@pytest.mark.parametrize(
    ("wish", "opted_in", "expected"),
    [
        ("", True, "Routed"),
        ("Enabled", True, "Routed"),
        ("Disabled", True, "Disabled"),
        ("", False, "Disabled"),
        ("Enabled", False, "NamespaceNotOptedIn"),
        ("Disabled", False, "Disabled"),
    ],
)
def test_namespaces_opt_in_and_endpoints_may_opt_out(wish: str, opted_in: bool, expected: str) -> None:
    routes, key = Routes(GATEWAY), Key("a", "demo")
    routes.learn(key, endpoint(1, gateway=wish), namespace("a", opted_in=opted_in))
    route = routes.of(key)
    assert route and route.reason == expected
    assert route.gateway == (GATEWAY if expected == "Routed" else None)


def test_missing_gateway_is_reported_only_to_endpoints_that_request_one() -> None:
    routes, key = Routes(None), Key("a", "demo")
    for wish, expected in {"": "", "Disabled": "", "Enabled": "NoGateway"}.items():
        routes.learn(key, endpoint(1, gateway=wish), None)
        assert reason(routes, key) == expected
    asks = endpoint(1)
    asks["spec"]["routing"] = {"sessionHeader": "X-Session-Id"}
    routes.learn(key, asks, None)
    assert reason(routes, key) == "NoGateway"


def test_endpoint_of_another_tenant_is_not_named() -> None:
    routes = Routes(GATEWAY)
    routes.learn(Key("rich", "first"), endpoint(1, "gemma"), namespace("rich"))
    routes.learn(Key("poor", "second"), endpoint(2, "gemma", "other"), namespace("poor"))
    routes.learn(Key("poor", "third"), endpoint(3, "other"), namespace("poor"))
    second, third = routes.of(Key("poor", "second")), routes.of(Key("poor", "third"))
    assert second and second.reason == "NameTaken" and "gemma" in second.message
    assert "rich" not in second.message and "first" not in second.message
    assert third and "the older endpoint second" in third.message


def test_a_name_passes_on_when_its_owner_leaves() -> None:
    first, second, third = Key("a", "first"), Key("b", "second"), Key("c", "third")
    routes = Routes(GATEWAY)
    for created, key in enumerate((first, second, third)):
        routes.learn(key, endpoint(created, "gemma"), namespace(key.namespace))
    assert [reason(routes, key) for key in (first, second, third)] == ["Routed", "NameTaken", "NameTaken"]
    going = {"deletionTimestamp": "2026-01-01T01:00:00Z"}
    assert second in routes.learn(first, endpoint(0, "gemma", **going), namespace("a"))
    assert reason(routes, second) == "Routed" and routes.of(first) is None
    assert third in routes.learn(second, endpoint(1, "gemma"), namespace("b", **going))
    assert reason(routes, third) == "Routed"
    assert routes.learn(third, endpoint(2, "gemma"), namespace("c")) == set(), "an unchanged endpoint concerns no other"


@pytest.mark.parametrize(
    "spec", [None, 5, {}, {"model": 1, "routing": []}, {"model": {"source": "x", "servedNames": 3}}]
)
def test_specs_of_another_schema_break_nothing(spec: Any) -> None:
    routes, key = Routes(GATEWAY), Key("a", "demo")
    routes.learn(key, {"metadata": {}, "spec": spec}, namespace("a"))
    assert reason(routes, key) == "NotAccepted"


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_obey_the_rules_and_wake_affected_endpoints(seed: int) -> None:
    chance = random.Random(seed)
    routes = Routes(GATEWAY)
    there: dict[Key, dict[str, Any]] = {}
    opted: dict[str, bool] = dict.fromkeys("abc", True)
    previous: dict[Key, Any] = {}
    for _ in range(300):
        concerned = set()
        if chance.random() < 0.15:
            name = chance.choice("abc")
            opted[name] = not opted[name]
            changed = [key for key in there if key.namespace == name]
        else:
            key = Key(chance.choice("abc"), chance.choice("xyz"))
            if chance.random() < 0.3:
                there.pop(key, None)
            else:
                names = chance.sample(["p", "q", "r", "s"], chance.randint(0, 3))
                wish = chance.choice(["", "", "Enabled", "Disabled"])
                there[key] = endpoint(chance.randint(0, 5), *names, gateway=wish, secret=chance.choice(["", "k", "l"]))
            changed = [key]
        for key in changed:
            concerned |= routes.learn(key, there.get(key), namespace(key.namespace, opted_in=opted[key.namespace]))
        now = {key: routes.of(key) for key in there}
        assert {key for key in now.keys() | previous.keys() if now.get(key) != previous.get(key)} <= concerned
        previous = now
        assert {key for key, route in now.items() if route and route.gateway} == served(there, opted)
    for name in opted:
        secrets = {secret_of(there[key]) for key in served(there, opted) if key.namespace == name} - {""}
        assert routes.secrets(name) == sorted(secrets)


def served(there: dict[Key, dict[str, Any]], opted: dict[str, bool]) -> set[Key]:
    """The rules in their simplest form: a name belongs to the oldest endpoint that claims it; an endpoint with all of
    its names is served.
    """

    def claims(key: Key) -> list[str]:
        spec = there[key]["spec"]
        if not opted[key.namespace] or spec.get("routing", {}).get("gateway") == "Disabled":
            return []
        return spec["model"].get("servedNames") or ["gemma-3-270m"]

    by_age = sorted(there, key=lambda key: (there[key]["metadata"]["creationTimestamp"], key))
    owners: dict[str, Key] = {}
    for key in by_age:
        for name in claims(key):
            owners.setdefault(name, key)
    return {key for key in there if claims(key) and all(owners[name] == key for name in claims(key))}


def secret_of(document: dict[str, Any]) -> str:
    return str(document["spec"].get("auth", {}).get("apiKeysSecretRef", {}).get("name", ""))
