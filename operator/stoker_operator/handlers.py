"""kopf's part: it delivers events, and each wakes the task of the endpoint it is about.

Only `on.event` is used. kopf's other handlers keep their state in annotations and finalizers of the objects they
handle, and an endpoint is its user's, not ours: it must be deletable also while no operator runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import kopf

from stoker_operator.api.v1alpha1 import GROUP, PLURAL, VERSION
from stoker_operator.endpoint_tasks import EndpointTasks
from stoker_operator.facts import Key
from stoker_operator.kube import Kube
from stoker_operator.manifests.owner import INSTANCE, MANAGED_BY
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.reconcile import Outcome, reconcile
from stoker_operator.settings import Settings

#: (group, version, plural) of what endpoints consist of. Pods are not among them: their Deployment tells of them.
CHILDREN = (("apps", "v1", "deployments"), ("", "v1", "services"), ("", "v1", "serviceaccounts"))


def registry(settings: Settings, kube: Kube, catalogue: Catalogue) -> kopf.OperatorRegistry:
    """What kopf is to call."""
    handlers = kopf.OperatorRegistry()

    async def reconcile_in_thread(key: Key) -> Outcome:
        return await asyncio.to_thread(reconcile, kube, catalogue, key, datetime.now(UTC))

    tasks = EndpointTasks(reconcile_in_thread, settings)

    kopf.on.login(registry=handlers)(kopf.login_via_client)  # into the same cluster as `kube`

    @kopf.on.startup(registry=handlers)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        quieten(settings)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=handlers)
    async def endpoint_changed(namespace: str | None, name: str | None, **_: Any) -> None:
        tasks.wake(Key(str(namespace), str(name)))

    async def child_changed(namespace: str | None, labels: Mapping[str, str], **_: Any) -> None:
        if INSTANCE in labels:
            tasks.wake(Key(str(namespace), labels[INSTANCE]))

    for group, version, plural in CHILDREN:
        kopf.on.event(group, version, plural, registry=handlers)(child_changed)

    @kopf.on.cleanup(registry=handlers)
    async def stop(**_: Any) -> None:
        await tasks.stop()

    return handlers


def quieten(settings: kopf.OperatorSettings) -> None:
    """Makes kopf only watch: it writes nothing, and asks for no more than we handle."""
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    # A watch is renewed now and then, so that a connection that died silently is noticed.
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    selector = ",".join(f"{name}={value}" for name, value in MANAGED_BY.items())
    for group, _, plural in CHILDREN:
        settings.watching.label_selectors[f"{plural}.{group}" if group else plural] = selector


def run(settings: Settings, kube: Kube, catalogue: Catalogue) -> None:
    """Runs the operator until SIGTERM or SIGINT."""
    identity: Any = "stoker"  # kopf would make one from the user's name, and a container's user has none
    kopf.run(
        registry=registry(settings, kube, catalogue),
        standalone=True,
        identity=identity,
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
        liveness_endpoint=f"http://{settings.health_address}/healthz",
    )
