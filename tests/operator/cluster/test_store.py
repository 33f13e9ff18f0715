"""The store's content does not depend on the order of events."""

from __future__ import annotations

import random
from typing import Any

from stoker_operator.cluster.store import Store
from stoker_operator.objects.facts import Key
from stoker_operator.objects.owner import INSTANCE


def service(name: str, version: int, **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "ns", "resourceVersion": str(version), "labels": {INSTANCE: name}}
    return {"kind": "Service", "metadata": {**metadata, **more}}


def store() -> Store:
    return Store("stoker", INSTANCE)


def version(kept: Store, name: str) -> str | None:
    live = kept.get("Service", "ns", name)
    return live["metadata"]["resourceVersion"] if live else None


def test_newer_version_of_an_object_wins() -> None:
    kept = store()
    assert kept.put(service("a", 5))
    assert not kept.put(service("a", 5))
    assert not kept.put(service("a", 4))
    assert kept.put(service("a", 6))
    assert version(kept, "a") == "6"


def test_older_event_does_not_restore_a_deleted_object() -> None:
    kept = store()
    kept.put(service("a", 5))
    kept.remove(service("a", 7))
    assert not kept.put(service("a", 6))
    assert version(kept, "a") is None
    assert kept.put(service("a", 8))  # a new object of that name


def test_writes_before_our_deletion_do_not_restore_the_object() -> None:
    """A deletion's response has no version, so the event of another client's earlier write may arrive after it."""
    event_after = store()
    event_after.put(service("a", 5, uid="1"))
    event_after.remove(service("a", 5, uid="1"))
    assert not event_after.put(service("a", 6, uid="1"))
    assert event_after.put(service("a", 7, uid="2"))  # a new object of that name

    event_before = store()
    event_before.put(service("a", 6, uid="1"))
    event_before.remove(service("a", 5, uid="1"))
    assert version(event_before, "a") is None


def test_object_kept_by_finalizers_stays_in_the_store() -> None:
    kept = store()
    kept.put(service("a", 5, uid="1"))
    kept.remove(service("a", 5, uid="1"))
    assert kept.put(service("a", 6, uid="1", deletionTimestamp="2026-01-01T00:00:00Z"))
    assert version(kept, "a") == "6"


def test_older_deletion_does_not_remove_a_newer_object() -> None:
    kept = store()
    kept.put(service("a", 8))
    kept.remove(service("a", 7))
    assert version(kept, "a") == "8"


def test_list_removes_missing_objects_and_keeps_newer_ones() -> None:
    kept = store()
    kept.put(service("old", 3))
    kept.put(service("new", 12))
    kept.put({**service("other", 3), "kind": "Deployment"})
    kept.replace("Service", "", [service("listed", 9)], "10")
    assert [version(kept, name) for name in ("old", "new", "listed")] == [None, "12", "9"]
    assert kept.get("Deployment", "ns", "other")


def test_list_of_a_namespace_does_not_affect_another() -> None:
    kept = store()
    kept.put(service("a", 3))
    kept.replace("Service", "elsewhere", [], "10")
    assert version(kept, "a") == "3"


def test_only_our_managed_fields_are_kept() -> None:
    kept = store()
    fields = [{"manager": "stoker", "operation": "Apply"}, {"manager": "kubectl", "operation": "Update"}]
    kept.put(service("a", 1, managedFields=fields))
    live: Any = kept.get("Service", "ns", "a")
    assert live["metadata"]["managedFields"] == fields[:1]


def test_objects_are_found_by_endpoint_after_a_label_change() -> None:
    kept = store()
    kept.put(service("a", 1))
    assert [each["metadata"]["name"] for each in kept.of_endpoint("Service", Key("ns", "a"))] == ["a"]
    kept.put(service("a", 2, labels={INSTANCE: "b"}))
    assert kept.of_endpoint("Service", Key("ns", "a")) == []
    assert len(kept.of_endpoint("Service", Key("ns", "b"))) == 1
    kept.remove(service("a", 3))
    assert kept.of_endpoint("Service", Key("ns", "b")) == []


def test_store_converges_for_any_order_of_events() -> None:
    draw = random.Random(0)
    for _ in range(200):
        # True history of three objects: created, changed, sometimes deleted.
        history: list[tuple[str, dict[str, Any]]] = []
        alive: dict[str, int] = {}
        born: dict[str, int] = {}
        for moment in range(1, 15):
            name = draw.choice("abc")
            uid = str(born.setdefault(name, moment))
            if name in alive and draw.random() < 0.4:
                history.append(("DELETED", service(name, moment, uid=uid)))
                del alive[name], born[name]
            else:
                history.append(("MODIFIED", service(name, moment, uid=uid)))
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


def test_list_reports_only_changed_objects() -> None:
    kept = store()
    kept.put(service("same", 3))
    kept.put(service("gone", 4))
    kept.put(service("changed", 5))
    listed = [service("same", 3), service("changed", 6), service("new", 7)]
    news = kept.replace("Service", "", listed, "10", kept.newest("Service", ""))
    assert sorted(each["metadata"]["name"] for each in news) == ["changed", "gone", "new"]
    assert kept.replace("Service", "", listed, "11", kept.newest("Service", "")) == []


def test_changes_during_a_list_are_newer_than_the_list() -> None:
    kept = store()
    kept.put(service("written", 3))
    kept.put(service("deleted", 4))
    since = kept.newest("Service", "")
    kept.put(service("written", 12))
    kept.remove(service("deleted", 13))
    assert kept.replace("Service", "", [service("written", 3), service("deleted", 4)], "10", since) == []
    assert (version(kept, "written"), version(kept, "deleted")) == ("12", None)


def test_restored_cluster_replaces_the_stores_content() -> None:
    kept = store()
    kept.put(service("changed", 500))
    kept.put(service("made-since", 510))
    kept.put(service("elsewhere", 520, namespace="other"))
    kept.put(service("deleted-since", 300))
    kept.remove(service("deleted-since", 530))
    restored = [service("changed", 200), service("deleted-since", 300)]
    news = kept.replace("Service", "ns", restored, "400", kept.newest("Service", "ns"))
    assert len(news) == 3
    assert version(kept, "changed") == "200" and version(kept, "deleted-since") == "300"
    assert version(kept, "made-since") is None
    assert kept.replace("Service", "other", [], "400", kept.newest("Service", "other"))
    kept.replace("Service", "ns", restored, "400", kept.newest("Service", "ns"))
    assert kept.newest("Service", "") == 400, "no version of before the restore is left"
    assert kept.put(service("changed", 401)), "later events are accepted"


def test_restored_cluster_with_newer_versions_replaces_the_content_too() -> None:
    kept = store()
    kept.put(service("changed", 500))
    kept.put(service("deleted-since", 300))
    kept.remove(service("deleted-since", 510))
    kept.replace("Service", "", [service("changed", 200), service("deleted-since", 300)], "900", 510)
    assert (version(kept, "changed"), version(kept, "deleted-since")) == ("200", "300")


def test_events_contradict_only_listed_versions() -> None:
    kept = store()
    kept.replace("Service", "", [service("a", 5)], "10")
    assert kept.contradicts(service("a", 4))
    assert not kept.contradicts(service("a", 5)) and not kept.contradicts(service("b", 4))
    kept.put(service("a", 12))  # for example an own write, during a watch's list
    assert not kept.contradicts(service("a", 5))
