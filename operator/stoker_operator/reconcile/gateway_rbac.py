"""Grants the gateway access to the API keys of the endpoints that it serves, by namespace.

The endpoints of a namespace share one Role, so no endpoint owns it. It is reconciled like endpoints' objects:
level-based, by server-side apply, and only if it differs from what is desired. It is deleted when no endpoint needs it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from stoker_operator.cluster.kube import Kube
from stoker_operator.cluster.store import Store
from stoker_operator.manifests.gateway_access import NAME, gateway_access
from stoker_operator.objects.facts import Child, Key, Object
from stoker_operator.objects.owner import MANAGED_BY
from stoker_operator.reconcile.apply import Writer
from stoker_operator.reconcile.other_operators import OtherOperators
from stoker_operator.reconcile.reconcile import Outcome
from stoker_operator.settings import GatewaySettings

#: Kinds of the objects that grant access.
KINDS: Final = ("Role", "RoleBinding")

logger = logging.getLogger(__name__)


def namespaces(store: Store) -> set[str]:
    """Return the names of the namespaces that have an object of a grant."""
    found = (each["metadata"] for kind in KINDS for each in store.all(kind))
    return {metadata["namespace"] for metadata in found if metadata["name"] == NAME}


def grant(
    kube: Kube,
    store: Store,
    writer: Writer,
    namespace: str,
    secrets: Sequence[str],
    gateway: GatewaySettings,
    operators: OtherOperators | None = None,
) -> Outcome:
    """Grant the gateway access to these Secrets of the namespace, and to no others.

    Raises:
        KubeError: a request to the API server failed.
        NotLeading: this replica of the operator no longer leads.
    """
    desired = gateway_access(namespace, secrets, gateway, operators.own_name if operators else "")
    live = {Child(kind): found for kind in KINDS if (found := store.get(kind, namespace, NAME)) is not None}
    for child in (Child.of(each) for each in desired):
        if child not in live and (unknown := kube.get(child.kind, namespace, NAME)) is not None:
            live[child] = unknown
    foreign = next((each for each in live.values() if not _is_ours(each)), None)
    if foreign is not None:
        logger.warning(
            "%s %s was not created by Stoker and is not changed, so the gateway cannot read the API keys of this "
            "namespace's endpoints; delete it",
            foreign["kind"],
            NAME,
            extra=Key(namespace, "").reference,
        )
        return Outcome.REFUSED
    if operators and operators.serving(Key(namespace, ""), live.get(Child("RoleBinding"))):
        return Outcome.YIELDED
    unwanted = [child for child in reversed(live) if child not in {Child.of(each) for each in desired}]
    applied = writer.apply(desired, live, unwanted)
    if operators:
        operators.observe(Key(namespace, ""), applied.live.get(Child("RoleBinding")))
    if applied.refusal:
        logger.warning(
            "the API server rejects an object that grants the gateway access to API keys: %s",
            applied.refusal,
            extra=Key(namespace, "").reference,
        )
        return Outcome.REFUSED
    return Outcome.SETTLED if desired else Outcome.GONE


def _is_ours(live: Object) -> bool:
    labels = live["metadata"].get("labels") or {}
    return all(labels.get(name) == value for name, value in MANAGED_BY.items())
