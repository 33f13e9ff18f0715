"""Evaluates a manifest: the objects for it, or its violations. Does not block.

Admission and reconcile share `evaluate`, so that they apply the same rules. Admission reports violations earlier, but
reconcile does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker_common.model_source import ModelSource
from stoker_operator.api.manifest import parse
from stoker_operator.api.v1alpha1 import InferenceEndpoint, Spec
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.manifests.children import children
from stoker_operator.objects.facts import Child, Object
from stoker_operator.objects.owner import Manifest, Owner
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.planner import Plan, Unplannable, plan, planned_ways_out
from stoker_operator.policy.policy import PERMISSIVE, Policy
from stoker_operator.policy.template_policy import forbidden
from stoker_operator.reconcile.routing import Route
from stoker_operator.scaling.autoscaler import Recommendation
from stoker_operator.workloads.composition import ONE_DEPLOYMENT, Composition, Role, Workload

#: Hub id and revision → the model's config.json, or None if it has not been fetched.
Configs = Callable[[str, str | None], Mapping[str, Any] | None]


@dataclass(frozen=True)
class PlanningContext:
    """The inputs of an evaluation besides the manifest and live objects; all of them are in memory.

    Attributes:
        catalogue: accelerators and images.
        configs: returns a hub model's config.json, or None if it has not been fetched.
        pod_monitors: whether the cluster has the kind PodMonitor.
        policy: the administrator's permissions and additions.
        pending: returns whether a hub model's config.json is being fetched for the first time.
        route: the gateway's route to the endpoint, or None if no gateway is involved.
        composition: the workloads of an endpoint.
        scaling: the autoscaler's recommendation for the endpoint, or None while there is none.
    """

    catalogue: Catalogue
    configs: Configs = lambda _id, _revision: None
    pod_monitors: bool = False
    policy: Policy = PERMISSIVE
    pending: Callable[[str, str | None], bool] = lambda _id, _revision: False
    route: Route | None = None
    composition: Composition = ONE_DEPLOYMENT
    scaling: Recommendation | None = None


@dataclass(frozen=True)
class Evaluation:
    """The result of evaluating a manifest.

    Attributes:
        parsed: the parsed endpoint, or None if the manifest cannot be parsed.
        workloads: the workloads of its spec; empty if the manifest cannot be parsed.
        plans: the plans of the workloads' pods, by workload name, without workloads that cannot be planned.
        objects: the objects that should exist; empty if there are violations.
        refused: violations other than `unplannable`.
        unplannable: reasons why the planner finds no plan.
        awaited: hub id and revision of a model whose config.json is being fetched and may change this evaluation.
    """

    parsed: InferenceEndpoint | None = None
    workloads: tuple[Workload, ...] = ()
    plans: Mapping[str, Plan] = field(default_factory=dict)
    objects: tuple[Manifest, ...] = ()
    refused: tuple[Violation, ...] = ()
    unplannable: tuple[Violation, ...] = ()
    awaited: tuple[str, str | None] | None = None

    @property
    def violations(self) -> tuple[Violation, ...]:
        """All violations."""
        return self.refused + self.unplannable

    @property
    def serving(self) -> Workload | None:
        """The workload whose pods answer requests; None if the manifest cannot be parsed."""
        return next((each for each in self.workloads if each.role is Role.SERVING), None)

    @property
    def plan(self) -> Plan | None:
        """The plan of the pods that answer requests, or None if there is none."""
        return self.plans.get(self.serving.name) if self.serving else None


def evaluate(
    owner: Owner,
    document: Object,
    context: PlanningContext,
    before: Object | None = None,
    live: Mapping[Child, Object] | None = None,
) -> Evaluation:
    """Evaluate the manifest `document` of the endpoint `owner`.

    Args:
        owner: the endpoint.
        document: its manifest.
        context: the other inputs.
        before: the manifest that this one replaces; None if it is new or changes are not checked.
        live: the endpoint's existing objects; None if unknown.
    """
    try:
        parsed = parse(document, before)
    except Refused as refused:
        against = refused.violations
        return Evaluation(
            refused=planned_ways_out(document, against, context.catalogue, lambda spec: _config(spec, context))
        )
    workloads = context.composition.workloads(parsed.spec)
    for workload in workloads:
        if against := forbidden(workload.spec.template, context.policy.template):
            return Evaluation(parsed, workloads, refused=against)
    # Looked up before planning: a config.json that arrives in between would otherwise be neither awaited nor used.
    awaited = _awaited(workloads, context)
    plans: dict[str, Plan] = {}
    refused_specs: tuple[Violation, ...] = ()
    unplannable: tuple[Violation, ...] = ()
    for workload in workloads:
        try:
            plans[workload.name] = plan(workload.spec, context.catalogue, _config(workload.spec, context))
        except Unplannable as refused:
            unplannable += refused.violations
        except Refused as refused:
            refused_specs += refused.violations
    if refused_specs or unplannable:
        return Evaluation(parsed, workloads, plans, refused=refused_specs, unplannable=unplannable)
    objects: tuple[Manifest, ...] = ()
    try:
        for workload in workloads:
            objects += _objects(owner.of(workload.name), workload, plans[workload.name], context, live or {})
    except Refused as refused:
        return Evaluation(parsed, workloads, plans, refused=refused.violations)
    return Evaluation(parsed, workloads, plans, objects, awaited=awaited)


def _objects(
    owner: Owner, workload: Workload, planned: Plan, context: PlanningContext, live: Mapping[Child, Object]
) -> tuple[Manifest, ...]:
    """Return the objects of a workload."""
    own = {
        child: each
        for child, each in live.items()
        if (child.kind, child.workload) == (workload.kind.name, workload.name)
    }
    return children(
        owner,
        workload.spec,
        planned,
        kind=workload.kind,
        role=workload.role,
        live=own,
        pod_monitors=context.pod_monitors,
        policy=context.policy,
        gateway=context.route.gateway if context.route else None,
        replicas=_replicas(workload, own, context),
    )


def _replicas(workload: Workload, live: Mapping[Child, Object], context: PlanningContext) -> int | None:
    """Return the number of replicas of a workload, or None for the number that a new endpoint gets.

    Without a recommendation of the autoscaler, the current number is kept within the spec's bounds.
    """
    scaling = workload.spec.scaling
    if scaling is None or workload.role is not Role.SERVING:
        return workload.spec.replicas
    if context.scaling is not None:
        return scaling.clamp(context.scaling.replicas)
    return scaling.clamp(workload.kind.rollout(tuple(live.values())).desired) if live else None


def _awaited(workloads: tuple[Workload, ...], context: PlanningContext) -> tuple[str, str | None] | None:
    """Return the first model whose config.json is being fetched, if there is one."""
    models = (_hub_model(each.spec) for each in workloads)
    missing = (model for model in models if model and context.configs(*model) is None and context.pending(*model))
    return next(missing, None)


def _hub_model(spec: Spec) -> tuple[str, str | None] | None:
    """Return hub id and revision of a spec's model, or None if it is not a hub model."""
    source = ModelSource.parse(spec.model.source)
    return (source.name, spec.model.revision) if source.scheme == "hf" else None


def _config(spec: Spec, context: PlanningContext) -> Mapping[str, Any] | None:
    """Return the config.json of a spec's model, or None if it has not been fetched or is not of the hub."""
    model = _hub_model(spec)
    return context.configs(*model) if model else None
