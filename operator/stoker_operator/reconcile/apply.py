"""Carries out decisions: the only module that writes endpoints' objects.

Objects and status are written by forced server-side apply under one field manager. It overwrites the fields that the
operator sets, and keeps those of other writers: an annotation added by `kubectl rollout restart` stays. The answer is
stored at once, so the next reconcile sees it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from stoker_operator.api.v1alpha1 import API_VERSION, KIND
from stoker_operator.cluster.kube import Kube, KubeError
from stoker_operator.cluster.store import Store
from stoker_operator.objects.facts import Child, Endpoint, Key, Object
from stoker_operator.objects.owner import INSTANCE, made_of, operator_of
from stoker_operator.reconcile.drift import differs

MANAGER: Final = "stoker"

#: Maximum number of attempts to write an object that other writers change.
_CONFLICTS: Final = 3

logger = logging.getLogger(__name__)


class NotLeading(Exception):  # noqa: N818 - nothing went wrong
    """This replica of the operator has lost the lead and must not write."""


@dataclass(frozen=True)
class Applied:
    """The result of applying objects.

    Attributes:
        live: the existing objects afterwards.
        refusal: the API server's messages about rejected objects; empty if none was rejected. If the dry run rejected
            one, nothing was applied. Otherwise all others were applied, except new workloads whose pods would lack a
            rejected object.
        refused: the first rejected object, if any.
    """

    live: Mapping[Child, Object]
    refusal: str = ""
    refused: Child | None = None


class WritesInFlight:
    """Counts the write requests that have been sent and not answered. Thread-safe."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def count(self) -> Iterator[None]:
        """Count one more write during the context."""
        with self._changed:
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Block until no write is in flight, at most for `seconds`. Return whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count == 0, seconds)


class Writer:
    """Writes objects while this replica leads.

    Args:
        kube: the API server's client.
        store: the observed objects.
        may_write: returns whether this replica may write; called before each write. A replica that has lost the lead
            must not finish the reconcile that it started, even if it leads again.
        in_flight: counts the writes.
    """

    def __init__(
        self,
        kube: Kube,
        store: Store,
        may_write: Callable[[], bool] = lambda: True,
        in_flight: WritesInFlight | None = None,
    ) -> None:
        self._kube = kube
        self._store = store
        self._may_write = may_write
        self._in_flight = in_flight or WritesInFlight()

    def apply(
        self,
        objects: Iterable[Object],
        live: Mapping[Child, Object],
        unwanted: Iterable[Child] = (),
        *,
        pods: Collection[str] = (),
        check: Collection[str] = (),
    ) -> Applied:
        """Apply objects and delete unwanted ones. Objects that are already in the desired state cost no request.

        Args:
            objects: the objects that should exist.
            live: the objects that exist.
            unwanted: the objects in `live` to delete.
            pods: the kinds of objects that create pods.
            check: the kinds of objects to validate by a dry run before anything is written.

        Raises:
            KubeError: a request failed, other than by the rejection of an applied object.
            NotLeading: this replica does not lead.
        """
        now = dict(live)
        children = {Child.of(each): each for each in objects}
        due = [child for child, each in children.items() if child not in now or differs(each, now[child], MANAGER)]
        for child in due:
            if child.kind in check:
                try:
                    self._apply(children[child], dry_run=True)
                except KubeError as error:
                    if not error.refused:
                        raise
                    return Applied(now, str(error), child)
        refusals: dict[Child, str] = {}
        for child in due:
            if child.kind in pods and child not in now and refusals.keys() - now.keys():
                continue  # its pods would lack the object that could not be created
            try:
                now[child] = self._apply_on(children[child], now.get(child))
            except KubeError as error:
                if not error.refused:
                    raise
                refusals[child] = str(error)
            else:
                _log(children[child], f"{child.kind} {'changed' if child in live else 'created'}")
        for child in unwanted:
            self._delete(now.pop(child))
        return Applied(now, "; ".join(refusals.values()), next(iter(refusals), None))

    def apply_status(
        self, endpoint: Endpoint, status: Mapping[str, Any], now: datetime, notices: Iterable[str] = ()
    ) -> bool:
        """Apply `status` if the endpoint's status differs from it, and emit Events about the changes.

        An Event is emitted if Ready's status or reason changes or its message gains one of `notices`, and another
        one if scaling changes the number of replicas.

        Returns:
            False if the spec has changed since it was read. The caller must then reconcile again: the API server's
            answer is stored, so the watch event of the new spec starts no reconcile.

        Raises:
            KubeError: the request failed, other than with status 404 or 409.
            NotLeading: this replica does not lead.
        """
        if status == endpoint.status:
            return True
        # The uid prevents a write to a new endpoint of the same name.
        metadata = {"name": endpoint.key.name, "namespace": endpoint.key.namespace, "uid": endpoint.uid}
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": dict(status)}
        try:
            answer = self._apply(body, subresource="status")
        except KubeError as error:
            if error.status not in (404, 409):  # gone or replaced: a watch event follows
                raise
            return True
        before, ready = _ready(endpoint.status), _ready(status)
        # A message that was cut lacks some notices in every status.
        is_new = any(
            notice in ready.get("message", "") and notice not in before.get("message", "") for notice in notices
        )
        if ready and ((ready["status"], ready["reason"]) != (before.get("status"), before.get("reason")) or is_new):
            _log(body, f"Ready is {ready['status']} ({ready['reason']}): {ready['message']}")
            self._record_event(endpoint, ready, now)
        if (rescaled := _rescaled(endpoint.status, status)) is not None:
            self._record_event(endpoint, rescaled, now)
        return bool(answer["metadata"]["generation"] == endpoint.generation)

    def _apply_on(self, desired: Object, live: Object | None) -> Object:
        """Apply an object that was decided from the state `live`.

        If `live` is an object that runs pods, the write fails if another operator, or a later leader with a newer spec,
        has written the object since. Other objects are overwritten.

        Raises:
            KubeError: the object could not be written.
            NotLeading: this replica does not lead.
        """
        if live is None or not made_of(live):
            return self._apply(desired)
        seen = live
        for _ in range(_CONFLICTS):
            body = {
                **desired,
                "metadata": {**desired["metadata"], "resourceVersion": seen["metadata"]["resourceVersion"]},
            }
            try:
                return self._apply(body)
            except KubeError as error:
                if error.status != 409:
                    raise
                metadata = desired["metadata"]
                found = self._kube.get(desired["kind"], metadata["namespace"], metadata["name"])
                if found is None:
                    raise
                self._store.put(found)
                if (made_of(found), operator_of(found)) != (made_of(live), operator_of(live)):
                    raise
                seen = found  # another part has changed, such as the status
        raise KubeError(
            409,
            f"{desired['kind']} {desired['metadata']['name']} was changed by another writer during each write attempt",
        )

    def _apply(self, body: Object, subresource: str = "", *, dry_run: bool = False) -> Object:
        with self._write():
            answer = self._kube.apply(dict(body), MANAGER, subresource, dry_run=dry_run)
        if not dry_run:
            self._store.put(answer)
        return answer

    def _delete(self, live: Object) -> None:
        metadata = live["metadata"]
        with self._write():
            self._kube.delete(live["kind"], metadata["namespace"], metadata["name"], metadata["uid"])
        self._store.remove(live)
        _log(live, f"{live['kind']} deleted")

    def _record_event(self, endpoint: Endpoint, ready: Mapping[str, str], now: datetime) -> None:
        """Create an Event for `kubectl describe`. A failed request is only logged."""
        at = f"{now:%Y-%m-%dT%H:%M:%SZ}"
        unique = hashlib.sha256(f"{endpoint.uid}{ready['reason']}{now.isoformat()}".encode()).hexdigest()[:16]
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{endpoint.key.name}.{unique}", "namespace": endpoint.key.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": endpoint.key.name,
                "namespace": endpoint.key.namespace,
                "uid": endpoint.uid,
                "resourceVersion": endpoint.document["metadata"]["resourceVersion"],
            },
            "type": "Warning" if _is_trouble(ready) else "Normal",
            "reason": ready["reason"],
            "message": ready["message"][:1024],
            "source": {"component": "stoker"},
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        try:
            with self._write():
                self._kube.create(event)
        except KubeError as error:
            logger.warning("could not create an Event: %s", error, extra=endpoint.key.reference)

    @contextlib.contextmanager
    def _write(self) -> Iterator[None]:
        with self._in_flight.count():
            # Checked after it is counted: if `may_write` changes to False, all later writes are refused, and all
            # earlier ones are counted.
            if not self._may_write():
                raise NotLeading
            yield


def _ready(status: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the condition Ready of a status; empty if it has none."""
    return next((each for each in status.get("conditions", ()) if each["type"] == "Ready"), {})


def _rescaled(before: Mapping[str, Any], now: Mapping[str, Any]) -> Mapping[str, str] | None:
    """Return the content of the Event for a number of replicas that scaling changed, or None without a change."""
    was, scaling = before.get("scaling"), now.get("scaling")
    if was is None or scaling is None or was["replicas"] == scaling["replicas"]:
        return None
    condition: Mapping[str, str] = next((each for each in now.get("conditions", ()) if each["type"] == "Scaling"), {})
    message = f"scaled from {was['replicas']} to {scaling['replicas']} replicas: {condition.get('message', '')}"
    return {"status": "True", "reason": "Rescaled", "message": message}


def _is_trouble(ready: Mapping[str, str]) -> bool:
    return ready["status"] == "False" and ready["reason"] != "RollingOut"


def _log(body: Object, message: str) -> None:
    """Log a message about an endpoint, or about an object with an endpoint's label."""
    metadata = body["metadata"]
    endpoint = (metadata.get("labels") or {}).get(INSTANCE, metadata["name"])
    logger.info(message, extra=Key(metadata["namespace"], endpoint).reference)
