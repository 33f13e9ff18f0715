"""Performs decisions: the only place that writes to the cluster.

Everything is written by server-side apply under one field manager. It takes the fields we set, from whoever changed
them, and leaves all others alone: an annotation that `kubectl rollout restart` added stays.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from stoker_operator.api.v1alpha1 import API_VERSION, KIND
from stoker_operator.drift import differs
from stoker_operator.facts import Endpoint, Object
from stoker_operator.kube import Kube, KubeError

MANAGER: Final = "stoker"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Applied:
    """What came of applying.

    Attributes:
        live: the objects as they are now, by kind.
        refusal: what the API server said of one that it will not take; those after it were not tried.
    """

    live: Mapping[str, Object]
    refusal: str = ""


def apply(kube: Kube, objects: Iterable[Object], live: Mapping[str, Object]) -> Applied:
    """Makes the objects so, asking for nothing that already is.

    Raises:
        KubeError: the API server could not be asked, or could not answer.
    """
    now = dict(live)
    for wanted in objects:
        kind = wanted["kind"]
        if kind in now and not differs(wanted, now[kind], MANAGER):
            continue
        try:
            now[kind] = kube.apply(dict(wanted), MANAGER)
        except KubeError as error:
            if not error.refused:
                raise
            return Applied(now, f"{kind}: {error}")
        metadata = wanted["metadata"]
        logger.info(
            "%s/%s: %s %s", metadata["namespace"], metadata["name"], kind, "changed" if kind in live else "created"
        )
    return Applied(now)


def apply_status(kube: Kube, endpoint: Endpoint, status: Mapping[str, Any]) -> None:
    """Makes the endpoint's status so, if it is not.

    Raises:
        KubeError: as `apply`.
    """
    if status == endpoint.status:
        return
    # The uid keeps a status from landing on a new endpoint of the same name.
    metadata = {"name": endpoint.key.name, "namespace": endpoint.key.namespace, "uid": endpoint.uid}
    body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": dict(status)}
    try:
        kube.apply(body, MANAGER, subresource="status")
    except KubeError as error:
        if error.status not in (404, 409):  # gone, or replaced: there will be an event
            raise
    if _ready(status) != _ready(endpoint.status):
        logger.info("%s: Ready is %s", endpoint.key, " ".join(_ready(status)))


def _ready(status: Mapping[str, Any]) -> tuple[str, ...]:
    """What people watch of a status."""
    condition = next((each for each in status.get("conditions", ()) if each["type"] == "Ready"), None)
    return (condition["status"], f"({condition['reason']}):", condition["message"]) if condition else ()
