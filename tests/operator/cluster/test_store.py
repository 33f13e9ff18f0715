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


def test_what_was_written_before_our_deletion_does_not_bring_it_back() -> None:
    """A deletion's response has no version, so the event of another client's earlier write may arrive after it."""
    told_after = store()
    told_after.put(service("a", 5, uid="1"))
    told_after.remove(service("a", 5, uid="1"))
    assert not told_after.put(service("a", 6, uid="1"))
    assert told_after.put(service("a", 7, uid="2"))  # a new object of that name

    told_before = store()
    told_before.put(service("a", 6, uid="1"))
    told_before.remove(service("a", 5, uid="1"))
    assert version(told_before, "a") is None


def test_what_its_finalizers_keep_is_still_there() -> None:
    kept = store()
    kept.put(service("a", 5, uid="1"))
    kept.remove(service("a", 5, uid="1"))
    assert kept.put(service("a", 6, uid="1", deletionTimestamp="2026-01-01T00:00:00Z"))
    assert version(kept, "a") == "6"


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


def test_what_a_list_tells_is_news_only_where_it_is() -> None:
    kept = store()
    kept.put(service("same", 3))
    kept.put(service("gone", 4))
    kept.put(service("changed", 5))
    listed = [service("same", 3), service("changed", 6), service("new", 7)]
    news = kept.replace("Service", "", listed, "10", kept.newest("Service", ""))
    assert sorted(each["metadata"]["name"] for each in news) == ["changed", "gone", "new"]
    assert kept.replace("Service", "", listed, "11", kept.newest("Service", "")) == []


def test_what_is_deleted_or_written_while_a_list_is_under_way_is_newer() -> None:
    kept = store()
    kept.put(service("written", 3))
    kept.put(service("deleted", 4))
    since = kept.newest("Service", "")
    kept.put(service("written", 12))
    kept.remove(service("deleted", 13))
    assert kept.replace("Service", "", [service("written", 3), service("deleted", 4)], "10", since) == []
    assert (version(kept, "written"), version(kept, "deleted")) == ("12", None)


def test_a_restored_cluster_is_taken_as_it_is_now() -> None:
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
    assert kept.newest("Service", "") == 400, "nothing of before is left"
    assert kept.put(service("changed", 401)), "and goes on from there"


def test_a_restored_cluster_that_has_grown_past_what_was_seen_is_taken_too() -> None:
    kept = store()
    kept.put(service("changed", 500))
    kept.put(service("deleted-since", 300))
    kept.remove(service("deleted-since", 510))
    kept.replace("Service", "", [service("changed", 200), service("deleted-since", 300)], "900", 510)
    assert (version(kept, "changed"), version(kept, "deleted-since")) == ("200", "300")


def test_only_what_a_list_told_contradicts_a_later_one() -> None:
    kept = store()
    kept.replace("Service", "", [service("a", 5)], "10")
    assert kept.contradicts(service("a", 4))
    assert not kept.contradicts(service("a", 5)) and not kept.contradicts(service("b", 4))
    kept.put(service("a", 12))  # for example an own write, during a watch's list
    assert not kept.contradicts(service("a", 5))
