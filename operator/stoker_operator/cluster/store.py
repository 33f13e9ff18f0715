"""In-memory copy of the watched objects, from lists, watches and the answers to the operator's own writes.

    list  ──────────► replace(): objects missing from the list are deleted
    watch ──────────► put(), remove()
    own writes ─────► put(), remove(): a write is visible at once, before the watch reports it

States arrive in any order, so an object's ``resourceVersion`` decides which of two states is newer. A deletion is
remembered with its version, because an older state may arrive later. The answer to the operator's own deletion has no
version, and another writer may have changed the object just before. So the object's uid is remembered too, which no
other object gets. Resource versions are increasing numbers (Kubernetes' KEP-5504), but go back when etcd is restored
from a backup. A list reveals this if its version is older than one that was seen before the list was requested.

Reads cost no request. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from stoker_operator.objects.facts import Key, Object

#: Maximum number of remembered deletions.
_TOMBSTONES: Final = 10_000


class Id(NamedTuple):
    """Identifies an object."""

    kind: str
    namespace: str
    name: str


class Tombstone(NamedTuple):
    """A remembered deletion: the version up to which states of the object are outdated, and the object's uid."""

    version: int
    uid: str


class Store:
    """The watched objects by kind, namespace and name.

    Args:
        manager: the operator's field manager. Of ``managedFields``, only its entries and those of the scale subresource
            are kept.
        instance: the label that names the endpoint of an object.
    """

    def __init__(self, manager: str, instance: str) -> None:
        self._manager = manager
        self._instance = instance
        self._lock = threading.Lock()
        self._objects: dict[str, dict[Id, Object]] = {}  # by kind, since all objects of a kind are read together
        self._of_endpoint: dict[tuple[str, Key], set[Id]] = {}
        self._deleted: dict[Id, Tombstone] = {}
        self._listed: dict[str, int] = {}  # resource version of the last list, by kind

    def put(self, seen: Object) -> bool:
        """Store an object if this state is newer than the known one, and return whether it is."""
        with self._lock:
            return self._put(seen)

    def remove(self, seen: Object) -> None:
        """Record an object's deletion, unless its name has a newer object; `seen` is its last known state."""
        with self._lock:
            current = self._find(_id(seen))
            if current is None or _version(current) <= _version(seen) or _is_before_deletion(current, _uid(seen)):
                self._remove(_id(seen), _version(seen), _uid(seen))

    def newest(self, kind: str, namespace: str) -> int:
        """Return the newest version seen of a kind in a namespace, or in all namespaces if `namespace` is empty."""
        with self._lock:
            present = {id: _version(each) for id, each in self._objects.get(kind, {}).items()}
            deleted = {id: tombstone.version for id, tombstone in self._deleted.items() if id.kind == kind}
            versions = (*present.items(), *deleted.items())
            return max((version for id, version in versions if namespace in ("", id.namespace)), default=0)

    def replace(self, kind: str, namespace: str, items: Iterable[Object], version: str, since: int = 0) -> list[Object]:
        """Store a complete list of a kind, and return the objects that were new, changed or deleted.

        Args:
            kind: the kind of object.
            namespace: the listed namespace; empty if all were listed.
            items: the objects.
            version: resource version of the list.
            since: the value of `newest` before the list was requested. A list with an older version shows that resource
                versions went back, so everything seen before is invalid.
        """
        at, news = int(version), []
        with self._lock:
            if at < since:
                forgotten = [id for id in self._deleted if id.kind == kind and namespace in ("", id.namespace)]
                for id in forgotten:
                    del self._deleted[id]
            # An object newer than the list was seen while the list was in progress, and is kept.
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
        """Return whether this state is older than the stored one and a list has confirmed the latter."""
        with self._lock:
            current = self._find(_id(seen))
            return current is not None and _version(seen) < _version(current) <= self._listed.get(seen["kind"], 0)

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return the object, or None if it is not stored."""
        with self._lock:
            return self._find(Id(kind, namespace, name))

    def of_endpoint(self, kind: str, key: Key) -> list[Object]:
        """Return the objects of a kind that have the endpoint's label."""
        with self._lock:
            return [self._objects[kind][id] for id in self._of_endpoint.get((kind, key), ())]

    def all(self, kind: str) -> list[Object]:
        """Return all objects of a kind."""
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
            del self._deleted[next(iter(self._deleted))]  # the oldest

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
        """Return the object without parts that are never read, to save memory with thousands of objects."""
        metadata: dict[str, Any] = {**seen["metadata"]}
        # The endpoint's status names other writers of the scale subresource, so their entries are kept.
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
    """Return whether `seen` is an earlier state of the deleted object with this uid.

    An object that finalizers keep has a deletionTimestamp, and is still stored.
    """
    return bool(uid) and _uid(seen) == uid and "deletionTimestamp" not in seen["metadata"]


def _version(seen: Object) -> int:
    return int(seen["metadata"]["resourceVersion"])
