"""The cluster as it was last seen, in memory: what lists and watches reported, and the answers to our own writes.

    list  ──────────► replace(): what is missing from the list is gone
    watch ──────────► put(), remove()
    our own writes ─► put(): we see what we wrote at once, before the watch reports it

The three arrive in any order, so each object's ``resourceVersion`` decides which of two sightings is the newer one,
and a deletion is kept with it for as long as an older sighting may still arrive. The answer to our own deletion has no
version, and somebody may have written just before it: so the object's uid is kept too, which no other object gets.
(Resource versions are numbers that only grow: Kubernetes' KEP-5504; every API server has kept to that.) But for one
case: where etcd is restored from a backup they go back. A list shows that, since it is at least as new as whatever was
seen before it was requested.

Reading costs no request, and may be done from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from stoker_operator.objects.facts import Key, Object

#: So many deletions are remembered.
_TOMBSTONES: Final = 10_000


class Id(NamedTuple):
    """Which object."""

    kind: str
    namespace: str
    name: str


class Tombstone(NamedTuple):
    """What is remembered of an object that is gone: the newest version that may have been of it, and its uid."""

    version: int
    uid: str


class Store:
    """The objects by kind, namespace and name.

    Args:
        manager: our field manager; who set which field is kept only as far as it was us.
        instance: the label that names the endpoint an object belongs to.
    """

    def __init__(self, manager: str, instance: str) -> None:
        self._manager = manager
        self._instance = instance
        self._lock = threading.Lock()
        self._objects: dict[str, dict[Id, Object]] = {}  # by kind: nodes and endpoints are read as such
        self._of_endpoint: dict[tuple[str, Key], set[Id]] = {}
        self._deleted: dict[Id, Tombstone] = {}
        self._listed: dict[str, int] = {}  # the version of the last list, by kind

    def put(self, seen: Object) -> bool:
        """Takes note of an object; whether that was new."""
        with self._lock:
            return self._put(seen)

    def remove(self, seen: Object) -> None:
        """Takes note of an object's deletion, whose last sighting this is."""
        with self._lock:
            current = self._find(_id(seen))
            if current is None or _version(current) <= _version(seen) or _is_before_deletion(current, _uid(seen)):
                self._remove(_id(seen), _version(seen), _uid(seen))

    def newest(self, kind: str, namespace: str) -> int:
        """The newest version that was seen of a kind in a namespace (empty: in all)."""
        with self._lock:
            present = {id: _version(each) for id, each in self._objects.get(kind, {}).items()}
            deleted = {id: tombstone.version for id, tombstone in self._deleted.items() if id.kind == kind}
            versions = (*present.items(), *deleted.items())
            return max((version for id, version in versions if namespace in ("", id.namespace)), default=0)

    def replace(self, kind: str, namespace: str, items: Iterable[Object], version: str, since: int = 0) -> list[Object]:
        """Takes note of all objects of a kind there are in a namespace (empty: in all); what of that was new, with
        what is gone.

        Args:
            kind: the kind of object.
            namespace: where they are.
            items: the objects.
            version: of the cluster, at which they were read.
            since: `newest`, before they were requested. A list that is older shows that versions went back, so that
                nothing seen before it holds any more.
        """
        at, news = int(version), []
        with self._lock:
            if at < since:
                forgotten = [id for id in self._deleted if id.kind == kind and namespace in ("", id.namespace)]
                for id in forgotten:
                    del self._deleted[id]
            # What is newer than the list was seen while it was under way, and stays.
            until = at if at >= since else since
            older = {
                id
                for id, live in self._objects.get(kind, {}).items()
                if namespace in ("", id.namespace) and _version(live) <= until
            }
            for seen in items:
                id = _id(seen)
                if id in older and _version(self._objects[kind][id]) > _version(seen):
                    self._forget(id)
                if id in self._deleted and self._deleted[id].version <= until:
                    del self._deleted[id]
                if self._put(seen):
                    news.append(seen)
                older.discard(id)
            for id in older:
                removed = self._objects[kind][id]
                news.append(removed)
                self._remove(id, at, _uid(removed))
            self._listed[kind] = at
        return news

    def contradicts(self, seen: Object) -> bool:
        """Whether a later list cannot report this of an object, since an earlier one has reported something newer."""
        with self._lock:
            current = self._find(_id(seen))
            return current is not None and _version(seen) < _version(current) <= self._listed.get(seen["kind"], 0)

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """The object, or None."""
        with self._lock:
            return self._find(Id(kind, namespace, name))

    def of_endpoint(self, kind: str, key: Key) -> list[Object]:
        """The objects of a kind that carry the endpoint's label."""
        with self._lock:
            return [self._objects[kind][id] for id in self._of_endpoint.get((kind, key), ())]

    def all(self, kind: str) -> list[Object]:
        """All objects of a kind."""
        with self._lock:
            return list(self._objects.get(kind, {}).values())

    def _find(self, id: Id) -> Object | None:
        return self._objects.get(id.kind, {}).get(id)

    def _put(self, seen: Object) -> bool:
        id, version = _id(seen), _version(seen)
        current = self._find(id)
        tombstone = self._deleted.get(id)
        if tombstone is not None and (version <= tombstone.version or _is_before_deletion(seen, tombstone.uid)):
            return False
        if current is not None and version <= _version(current):
            return False
        if current is not None:
            self._unlink(id, current)
        self._objects.setdefault(id.kind, {})[id] = self._slim(seen)
        endpoint = self._endpoint(id, seen)
        if endpoint:
            self._of_endpoint.setdefault((id.kind, endpoint), set()).add(id)
        return True

    def _forget(self, id: Id) -> None:
        current = self._objects.get(id.kind, {}).pop(id, None)
        if current is not None:
            self._unlink(id, current)

    def _remove(self, id: Id, version: int, uid: str) -> None:
        self._forget(id)
        before = self._deleted.get(id)
        self._deleted[id] = Tombstone(max(version, before.version if before else 0), uid)
        if len(self._deleted) > _TOMBSTONES:
            del self._deleted[next(iter(self._deleted))]  # the one remembered longest

    def _unlink(self, id: Id, live: Object) -> None:
        endpoint = self._endpoint(id, live)
        if endpoint:
            self._of_endpoint[id.kind, endpoint].discard(id)
            if not self._of_endpoint[id.kind, endpoint]:
                del self._of_endpoint[id.kind, endpoint]

    def _endpoint(self, id: Id, seen: Object) -> Key | None:
        name = (seen["metadata"].get("labels") or {}).get(self._instance)
        return Key(id.namespace, name) if name else None

    def _slim(self, seen: Object) -> Object:
        """Without what is never read here and thousands of objects would keep in memory."""
        metadata: dict[str, Any] = {**seen["metadata"]}
        # Who else writes how many replicas an endpoint has is reported.
        fields = [
            each
            for each in metadata.pop("managedFields", ())
            if each["manager"] == self._manager or each.get("subresource") == "scale"
        ]
        if fields:
            metadata["managedFields"] = fields
        slim = {**seen, "metadata": metadata}
        if seen["kind"] == "Pod":
            containers = [
                {"name": each["name"], "resources": each.get("resources", {})} for each in seen["spec"]["containers"]
            ]
            slim["spec"] = {"nodeName": seen["spec"].get("nodeName"), "containers": containers}
        if seen["kind"] == "Node":
            status = seen.get("status", {})
            slim["status"] = {name: status.get(name, {}) for name in ("allocatable", "conditions")}
        if seen["kind"] == "Namespace":
            slim = {"kind": seen["kind"], "metadata": metadata}
        return slim


def _id(seen: Object) -> Id:
    metadata = seen["metadata"]
    return Id(seen["kind"], metadata.get("namespace", ""), metadata["name"])


def _uid(seen: Object) -> str:
    return str(seen["metadata"].get("uid", ""))


def _is_before_deletion(seen: Object, uid: str) -> bool:
    """Whether this is an older sighting of the object of that uid, which has been deleted; one that its finalizers keep
    says itself that it is being deleted."""
    return bool(uid) and _uid(seen) == uid and "deletionTimestamp" not in seen["metadata"]


def _version(seen: Object) -> int:
    return int(seen["metadata"]["resourceVersion"])
