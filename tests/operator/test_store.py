"""What was seen, in whatever order it was told."""

from __future__ import annotations

import random
from typing import Any

from stoker_operator.facts import Key
from stoker_operator.manifests.owner import INSTANCE
from stoker_operator.store import Store


def service(name: str, version: int, **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "ns", "resourceVersion": str(version), "labels": {INSTANCE: name}}
    return {"kind": "Service", "metadata": {**metadata, **more}}


def store() -> Store:
    return Store("stoker", INSTANCE)


def version(kept: Store, name: str) -> str | None:
    live = kept.get("Service", "ns", name)
    return live["metadata"]["resourceVersion"] if live else None


def test_the_newer_sighting_counts() -> None:
    kept = store()
    assert kept.put(service("a", 5))
    assert not kept.put(service("a", 5))
    assert not kept.put(service("a", 4))
    assert kept.put(service("a", 6))
    assert version(kept, "a") == "6"


def test_what_was_deleted_is_not_brought_back_by_an_older_sighting() -> None:
    kept = store()
    kept.put(service("a", 5))
    kept.remove(service("a", 7))
    assert not kept.put(service("a", 6))
    assert version(kept, "a") is None
    assert kept.put(service("a", 8))  # a new object of that name


def test_an_older_deletion_does_not_remove_a_newer_object() -> None:
    kept = store()
    kept.put(service("a", 8))
    kept.remove(service("a", 7))
    assert version(kept, "a") == "8"


def test_a_list_removes_what_it_lacks_and_nothing_newer() -> None:
    kept = store()
    kept.put(service("old", 3))
    kept.put(service("new", 12))
    kept.put({**service("other", 3), "kind": "Deployment"})
    kept.replace("Service", "", [service("listed", 9)], "10")
    assert [version(kept, name) for name in ("old", "new", "listed")] == [None, "12", "9"]
    assert kept.get("Deployment", "ns", "other")


def test_a_list_of_one_namespace_says_nothing_of_another() -> None:
    kept = store()
    kept.put(service("a", 3))
    kept.replace("Service", "elsewhere", [], "10")
    assert version(kept, "a") == "3"


def test_only_our_fields_are_kept_of_those_that_say_who_set_them() -> None:
    kept = store()
    fields = [{"manager": "stoker", "operation": "Apply"}, {"manager": "kubectl", "operation": "Update"}]
    kept.put(service("a", 1, managedFields=fields))
    live: Any = kept.get("Service", "ns", "a")
    assert live["metadata"]["managedFields"] == fields[:1]


def test_objects_are_found_by_endpoint_also_after_their_label_changed() -> None:
    kept = store()
    kept.put(service("a", 1))
    assert [each["metadata"]["name"] for each in kept.of_endpoint("Service", Key("ns", "a"))] == ["a"]
    kept.put(service("a", 2, labels={INSTANCE: "b"}))
    assert kept.of_endpoint("Service", Key("ns", "a")) == []
    assert len(kept.of_endpoint("Service", Key("ns", "b"))) == 1
    kept.remove(service("a", 3))
    assert kept.of_endpoint("Service", Key("ns", "b")) == []


def test_any_order_of_the_same_news_ends_the_same() -> None:
    draw = random.Random(0)
    for _ in range(200):
        # The true history of three objects: created, changed, now and then deleted.
        history: list[tuple[str, dict[str, Any]]] = []
        alive: dict[str, int] = {}
        for moment in range(1, 15):
            name = draw.choice("abc")
            if name in alive and draw.random() < 0.4:
                history.append(("DELETED", service(name, moment)))
                del alive[name]
            else:
                history.append(("MODIFIED", service(name, moment)))
                alive[name] = moment
        kept = store()
        news = history * 2
        draw.shuffle(news)
        for change, seen in news:
            if change == "DELETED":
                kept.remove(seen)
            else:
                kept.put(seen)
        found = {each["metadata"]["name"]: int(each["metadata"]["resourceVersion"]) for each in kept.all("Service")}
        assert found == alive
