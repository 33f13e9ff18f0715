"""From the API server's objects to the model registry."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_gateway.kubernetes import build_registry, facts
from stoker_gateway.kubernetes.credentials import Credentials, first_key
from stoker_gateway.kubernetes.key_history import KeyHistory
from stoker_gateway.registry.model_registry import Phase, Scaling

from .stand_in_api import endpoint, secret, slice_of

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def _mutations(seen: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in an object."""
    inner = seen.items() if isinstance(seen, dict) else enumerate(seen) if isinstance(seen, list) else ()
    return [path] + [each for key, value in inner for each in _mutations(value, (*path, key))]


@given(st.data())
def test_mutated_objects_never_raise(data: st.DataObject) -> None:
    full = endpoint(
        "a",
        auth={"apiKeysSecretRef": {"name": "s"}},
        routing={"sessionHeader": "X-S"},
        scaling={"minReplicas": 0, "holdSeconds": 5},
    )
    full["status"]["scaling"] = {"phase": "Draining", "drain": "w", "startFailure": "no image"}
    for whole, read in (
        (full, facts.read_endpoint),
        (slice_of("a", "10.0.0.1:80"), facts.read_slice),
        (secret("a", api_key="k"), facts.read_key),
        (secret("a", api_key="k"), first_key),
    ):
        path = data.draw(st.sampled_from(_mutations(whole)[1:]))
        changed = _replaced(whole, path, data.draw(_JSON))
        made = read(changed)
        if isinstance(made, facts.EndpointFacts) and made.scaling is not None:
            scaling = made.scaling
            assert 0 <= scaling.hold_s <= facts.MAX_HOLD_S and len(scaling.start_failure) <= 1024
            assert scaling.phase is not Phase.DRAINING or 0 < len(scaling.drain) <= 253
        if isinstance(made, facts.EndpointFacts):
            build_registry.make([made], [], {}, KeyHistory())
        if isinstance(made, facts.SliceFacts):
            build_registry.make([], [made], {}, KeyHistory())


def _replaced(seen: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    if isinstance(seen, dict):
        return {**seen, path[0]: _replaced(seen[path[0]], path[1:], value)}
    return [_replaced(each, path[1:], value) if number == path[0] else each for number, each in enumerate(seen)]


@pytest.mark.parametrize("seed", range(50))
def test_served_name_belongs_to_the_oldest_endpoint_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    names = ["m", "n", "org/o"]
    spaces = [(space, each) for space in "ab" for each in "xyz"]
    seen = [
        endpoint(
            name,
            space,
            created=f"2026-01-0{rng.randrange(1, 3)}T00:00:00Z",
            model={"source": "hf://a/b", "servedNames": rng.sample(names, rng.randrange(1, 4))},
        )
        for space, name in spaces
        if rng.random() < 0.6
    ]
    slices = [slice_of(name, f"10.0.{number}.1:80", namespace=space) for number, (space, name) in enumerate(spaces)]
    address = {at: f"10.0.{number}.1:80" for number, at in enumerate(spaces)}
    read = [made for each in seen if (made := facts.read_endpoint(each)) is not None]
    assert len(read) == len(seen)
    rng.shuffle(read)
    model_registry = build_registry.make(read, filter(None, map(facts.read_slice, slices)), {}, KeyHistory())
    for name in names:
        claims = [
            (each["metadata"]["creationTimestamp"], each["metadata"]["namespace"], each["metadata"]["name"])
            for each in seen
            if name in each["spec"]["model"]["servedNames"]
        ]
        if claims:
            assert model_registry.endpoints[name].servers == (address[min(claims)[1:]],)
        else:
            assert name not in model_registry.endpoints
    clusters = [each.cluster for each in model_registry.endpoints.values()]
    assert len(set(clusters)) == len(clusters)


def test_pods_count_once_and_only_if_they_accept_requests() -> None:
    one, two = slice_of("a", "10.0.0.1:80"), slice_of("a", "10.0.0.1:80")
    six = slice_of("a", "[fd00::1]:80", "[fd00::2]:80")
    pods = {"10.0.0.1": "u1", "fd00::1": "u1", "fd00::2": "u2", "10.0.0.4": "u4"}
    states = slice_of("a", "10.0.0.3:80", "10.0.0.4:80", "10.0.0.5:80", "10.0.0.6:80")
    for each, conditions in zip(
        states["endpoints"],
        (
            {"ready": False, "serving": True, "terminating": True},
            {},
            {"ready": True, "terminating": True},
            {"ready": False},
        ),
        strict=True,
    ):
        each["conditions"] = conditions
    every = [one, two, six, states, slice_of("other", "10.0.0.7:80"), slice_of("a", "10.0.0.8:80", namespace="two")]
    for each in itertools.chain.from_iterable(one_slice["endpoints"] for one_slice in every):
        if (pod := pods.get(each["addresses"][0])) is not None:
            each["targetRef"] = {"kind": "Pod", "uid": pod}
    read = facts.read_endpoint(endpoint("a"))
    assert read is not None
    model_registry = build_registry.make([read], filter(None, map(facts.read_slice, every)), {}, KeyHistory())
    assert model_registry.endpoints["org/a"].servers == ("10.0.0.1:80", "10.0.0.4:80", "[fd00::2]:80")


def test_endpoints_without_a_gateway_address_are_ignored() -> None:
    seen = endpoint("a")
    for addresses in (None, [], [{"name": "cluster"}], "gateway"):
        assert facts.read_endpoint({**seen, "status": {"addresses": addresses}}) is None
    assert facts.read_endpoint({**seen, "status": None}) is None


def test_servers_that_require_a_key_get_it_or_no_requests() -> None:
    auth = {"apiKeysSecretRef": {"name": "s"}}
    seen = [
        endpoint("a", auth=auth, routing={"sessionHeader": "X-Session"}),
        endpoint("b", "two", auth=auth),
        endpoint("c"),
    ]
    tls = endpoint("d")
    tls["status"]["url"] = "https://d/v1"
    read = [made for each in [*seen, tls] if (made := facts.read_endpoint(each)) is not None]
    history = KeyHistory()
    build_registry.make(read, [], {("one", "s"): "k0"}, history)
    made = build_registry.make(read, [], {("one", "s"): "k1"}, history).endpoints
    assert (made["org/a"].authorization, made["org/a"].refusal) == ("Bearer k1", None)
    assert made["org/a"].session_header == "x-session"
    assert (made["org/b"].authorization, made["org/b"].refusal) == (None, build_registry.NO_CREDENTIAL)
    assert (made["org/c"].authorization, made["org/c"].refusal) == (None, None)
    assert made["org/d"].refusal == build_registry.TLS
    assert made["org/a"].created == 1767225600
    assert made["org/a"].authorizations == ("Bearer k1", "Bearer k0")
    assert made["org/b"].authorizations == made["org/c"].authorizations == ("",)
    assert "k1" not in repr(made) and "k0" not in repr(made)


def test_earlier_keys_are_kept_per_endpoint_and_limited() -> None:
    history, one = KeyHistory(), ("one", "a")
    assert history.update(one, "s", None) == ()
    assert history.update(one, "s", "k1") == ("k1",)
    assert history.update(("two", "a"), "s", None) == ()  # another endpoint's
    assert history.update(one, "s-2", None) == ("k1",)  # a new Secret, not readable yet
    assert history.update(one, "s", None) == ()  # the Secret was deleted
    assert history.update(one, "s-2", "k2") == ("k2", "k1")
    assert history.update(one, None, None) == (None, "k2", "k1")
    assert history.update(one, "s", "k1") == ("k1", None, "k2")
    for number in range(3, 9):
        history.update(one, "s", f"k{number}")
    assert history.update(one, "s", "k8") == ("k8", "k7", "k6", "k5")
    history.keep([("two", "a")])
    assert history.update(one, "s", None) == ()


@pytest.mark.parametrize(
    ("entries", "key"),
    [
        ({"api_key": "k"}, "k"),
        ({"alice": " a \nb\n", "bob": "c"}, "a"),
        ({"alice": "a", "api_key": "k"}, "k"),
        ({".old": "x", "bob": "\n\nc"}, "c"),
        ({"alice": "", "bob": "c"}, "c"),
        ({"api_key": "a\x00b"}, None),
        ({"api_key": "ä"}, None),
        ({}, None),
    ],
)
def test_first_usable_key_of_the_secret_is_sent(entries: dict[str, str], key: str | None) -> None:
    assert first_key(secret("s", **entries)) == key


@pytest.mark.parametrize("entries", [{}, {"api_key": "", "bob": "\n"}, {"api_key": "\nä"}, {"alice": "ä"}])
def test_secret_without_a_usable_key_is_logged_with_what_it_lacks(
    entries: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    class Answers:
        def get(self, _: str) -> Any:
            credentials.stop()
            return secret("s", **entries)

    credentials = Credentials(Answers(), lambda: None)  # type: ignore[arg-type]
    credentials.set_secrets({("one", "s"): 0})
    credentials.run()
    (message,) = caplog.messages
    assert "cannot be read: no entry has a line with text, or the first such line is not printable ASCII; " in message


def _scaling_of(spec: Any, status: Any) -> Scaling | None:
    seen = endpoint("a", scaling=spec)
    seen["status"]["scaling"] = status
    made = facts.read_endpoint(seen)
    assert made is not None
    return made.scaling


@pytest.mark.parametrize(
    ("hold", "expected"),
    [
        (5, 5.0),
        (0, 0.0),
        (3600, facts.MAX_HOLD_S),
        (10**400, facts.MAX_HOLD_S),
        (float("inf"), facts.MAX_HOLD_S),
        (float("nan"), facts.DEFAULT_HOLD_S),
        (-1, facts.DEFAULT_HOLD_S),
        (True, facts.DEFAULT_HOLD_S),
        ("5", facts.DEFAULT_HOLD_S),
        (None, facts.DEFAULT_HOLD_S),
    ],
)
def test_hold_time_is_bounded(hold: Any, expected: float) -> None:
    assert _scaling_of({"holdSeconds": hold}, {}) == Scaling("one", "a", expected)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"phase": "Draining", "drain": "w"}, (Phase.DRAINING, "w", "")),
        ({"phase": "Zero"}, (Phase.ZERO, "", "")),
        ({"phase": "Active", "startFailure": " no image "}, (Phase.ACTIVE, "", "no image")),
        ({"phase": "Draining"}, (Phase.ACTIVE, "", "")),
        ({"phase": "Draining", "drain": "w" * 254}, (Phase.ACTIVE, "", "")),
        ({"phase": "Draining", "drain": ["w"]}, (Phase.ACTIVE, "", "")),
        ({"phase": "draining", "drain": "w"}, (Phase.ACTIVE, "w", "")),
        ({"phase": ["Zero"], "startFailure": {}}, (Phase.ACTIVE, "", "")),
        ({"startFailure": "x" * 5000}, (Phase.ACTIVE, "", "x" * 1024)),
        (None, (Phase.ACTIVE, "", "")),
        ("Zero", (Phase.ACTIVE, "", "")),
    ],
)
def test_malformed_status_stops_no_traffic(status: Any, expected: tuple[Phase, str, str]) -> None:
    scaling = _scaling_of({}, status)
    assert scaling is not None and (scaling.phase, scaling.drain, scaling.start_failure) == expected


_OWNER_OF_REPLICAS = {"manager": "kubectl", "fieldsV1": {"f:spec": {".": {}, "f:replicas": {}}}}
_OWNER_OF_MODEL = {"manager": "kubectl", "fieldsV1": {"f:spec": {"f:model": {}}}}


_SCALED = {"manager": "keda", "subresource": "scale", "fieldsV1": {"f:spec": {"f:replicas": {}}}}


@pytest.mark.parametrize(
    ("managed_fields", "is_held"),
    [
        ([_OWNER_OF_MODEL, _SCALED], True),
        # A 0 written through the scale subresource has no manager, nor have later writes through it.
        ([_OWNER_OF_MODEL, {"manager": "stoker", "subresource": "status"}], True),
        ([_OWNER_OF_MODEL, {"fieldsV1": {"f:spec": "?"}}, {"fieldsV1": []}, "scale", None], True),
        ([_OWNER_OF_REPLICAS], False),
        ([_OWNER_OF_REPLICAS, _SCALED], False),
        ([{**_OWNER_OF_REPLICAS, "subresource": {}}], False),
        ([], False),
        ("scale", False),
        (None, False),
    ],
)
def test_requests_are_held_for_an_endpoint_whose_replicas_another_autoscaler_has_set(
    managed_fields: Any, is_held: bool
) -> None:
    def scaling_of(seen: Any, **options: bool) -> Scaling | None:
        made = facts.read_endpoint(seen)
        assert made is not None
        return build_registry.make([made], [], {}, KeyHistory(), **options).endpoints["org/a"].scaling

    seen = endpoint("a")
    seen["metadata"]["managedFields"] = managed_fields
    assert scaling_of(seen) is None
    assert scaling_of(seen, holds_external=True) == (Scaling("one", "a", facts.DEFAULT_HOLD_S) if is_held else None)
    seen["spec"]["scaling"] = {"holdSeconds": 7}
    assert scaling_of(seen, holds_external=True) == Scaling("one", "a", 7)


def test_starting_pods_are_servers_only_of_endpoints_with_scaling() -> None:
    slices = [slice_of(name, "10.0.0.1:80", ready=False) for name in ("a", "b")]
    read = [facts.read_endpoint(endpoint("a", scaling={})), facts.read_endpoint(endpoint("b"))]
    made = build_registry.make(filter(None, read), filter(None, map(facts.read_slice, slices)), {}, KeyHistory())
    assert {name: each.servers for name, each in made.endpoints.items()} == {"org/a": ("10.0.0.1:80",), "org/b": ()}
    leaving = slice_of("a", "10.0.0.1:80", ready=False)
    leaving["endpoints"][0]["conditions"]["terminating"] = True
    assert facts.read_slice(leaving) is None
