"""Evaluates manifests for the webhook, from memory and with the same code as a reconcile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Final

from stoker_operator.admission.review import Object, ReviewVerdict
from stoker_operator.cluster import observe
from stoker_operator.cluster.hub_configs import HubConfigs
from stoker_operator.cluster.store import Store
from stoker_operator.manifests.storage import shrinking_problem
from stoker_operator.objects.owner import Owner
from stoker_operator.plan.capacity import capacity
from stoker_operator.reconcile.decide import is_ours
from stoker_operator.reconcile.evaluate import Evaluation, PlanningContext, evaluate

#: Maximum time that a review waits for a model's config.json, in seconds. It must be below the webhook's timeout.
_WAITS_SECONDS: Final = 2


class Reviews:
    """Evaluates manifests for the webhook.

    Args:
        store: the watched objects.
        configs: config.json of hub models.
        context: returns the other inputs of an evaluation.
    """

    def __init__(self, store: Store, configs: HubConfigs, context: Callable[[], PlanningContext]) -> None:
        self._store = store
        self._configs = configs
        self._context = context
        self._hub_attempted = asyncio.Event()

    async def await_config(self, document: Object) -> None:
        """Wait a short time for the model's config.json, if it is pending."""
        awaited = self._evaluate(document).awaited if _is_of_hub(document) else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WAITS_SECONDS):
                while awaited and self._configs.pending(*awaited):
                    await self._hub_attempted.wait()

    def on_hub_attempt(self) -> None:
        """Wake waiting reviews after an attempt to fetch a config.json."""
        self._hub_attempted.set()
        self._hub_attempted = asyncio.Event()

    def check(self, document: Object, before: Object | None) -> ReviewVerdict:
        """Return the verdict on a manifest; `before` is the manifest that it replaces, if any."""
        evaluation = self._evaluate(document, before)
        if evaluation.plan is None or evaluation.parsed is None:
            return ReviewVerdict(evaluation.violations)
        violations, notices, nodes = list(evaluation.violations), [], observe.nodes(self._store)
        for workload in evaluation.workloads:
            if before and (problem := shrinking_problem(workload.spec, self._claim(document, workload.name))):
                violations.append(problem)
            if planned := evaluation.plans.get(workload.name):
                # Occupied accelerators may become free later, so only the nodes' totals are checked.
                room = capacity(nodes, (), planned.placement.accelerator, planned.placement.count)
                notices += [*planned.warnings, *([room] if room else [])]
        return ReviewVerdict(tuple(violations), tuple(dict.fromkeys(notices)))

    def _evaluate(self, document: Object, before: Object | None = None) -> Evaluation:
        metadata = document["metadata"]
        name = metadata.get("name") or metadata.get("generateName") or ""
        return evaluate(Owner(name, metadata.get("namespace")), document, self._context(), before)

    def _claim(self, document: Object, workload: str) -> Object | None:
        """Return the PersistentVolumeClaim of an endpoint's workload, or None if the endpoint owns none."""
        metadata = document["metadata"]
        owner = Owner(metadata["name"], metadata.get("namespace"), metadata.get("uid"), workload)
        live = self._store.get("PersistentVolumeClaim", owner.namespace or "", owner.object_name)
        return live if live is not None and is_ours(owner, live) else None


def _is_of_hub(document: Object) -> bool:
    """Return whether a manifest, which may be invalid, names a model of the hub."""
    spec = document.get("spec")
    model = spec.get("model") if isinstance(spec, Mapping) else None
    source = model.get("source") if isinstance(model, Mapping) else None
    return isinstance(source, str) and source.startswith("hf://")
