"""A manifest → what its objects will be, or all objections to it. Pure.

Admission and reconcile both judge by this, so that they cannot come to different verdicts: admission saves the user
the wait, and reconcile needs no admission.
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

#: Hub id and revision → the model's config.json, where it has been fetched.
Configs = Callable[[str, str | None], Mapping[str, Any] | None]


@dataclass(frozen=True)
class PlanningContext:
    """What verdicts rest on beside the manifest; all of it is in memory.

    Attributes:
        catalogue: accelerators and images.
        configs: descriptions of hub models, as far as they have been fetched.
        pod_monitors: the cluster has PodMonitors.
        policy: what the administrator permits and adds.
        pending: whether a hub model's description is being fetched for the first time.
        route: whether the gateway serves the endpoint, where there is something to say.
        composition: of which workloads endpoints consist.
        scaling: what the autoscaler recommends for the endpoint; None: nothing, or not yet.
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
    """What is made of a manifest.

    Attributes:
        parsed: the endpoint, where the manifest can be read.
        workloads: the workloads of its spec, where the manifest can be read.
        plans: what their pods will be, by the workload's name; without those that cannot run so.
        objects: what should exist for it; empty where there is an objection.
        refused: objections to the manifest itself.
        unplannable: objections to any plan for it.
        awaited: hub id and revision of its model, where the description is being fetched that may change all of this.
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
        """All objections to it."""
        return self.refused + self.unplannable

    @property
    def serving(self) -> Workload | None:
        """The workload whose pods answer requests; None where the manifest cannot be read."""
        return next((each for each in self.workloads if each.role is Role.SERVING), None)

    @property
    def plan(self) -> Plan | None:
        """What the pods that answer requests will be."""
        return self.plans.get(self.serving.name) if self.serving else None


def evaluate(
    owner: Owner,
    document: Object,
    context: PlanningContext,
    before: Object | None = None,
    live: Mapping[Child, Object] | None = None,
) -> Evaluation:
    """Judges the manifest `document` of the endpoint `owner`.

    Args:
        owner: the endpoint.
        document: its manifest.
        context: what the verdict rests on beside it.
        before: the manifest that this one changes, where it does.
        live: the endpoint's objects, where they are known.
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
    # Looked up before the plans, so that a description that arrives meanwhile is either awaited or in them.
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
    """The objects of a workload."""
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
    """How many replicas a workload should have; None: as many as a new endpoint has. Where the autoscaler has not
    recommended anything yet, the present number stays."""
    scaling = workload.spec.scaling
    if scaling is None or workload.role is not Role.SERVING:
        return workload.spec.replicas
    if context.scaling is not None:
        return scaling.clamp(context.scaling.replicas)
    return scaling.clamp(workload.kind.rollout(tuple(live.values())).desired) if live else None


def _awaited(workloads: tuple[Workload, ...], context: PlanningContext) -> tuple[str, str | None] | None:
    """The first model of which the description is being fetched."""
    models = (_hub_model(each.spec) for each in workloads)
    missing = (model for model in models if model and context.configs(*model) is None and context.pending(*model))
    return next(missing, None)


def _hub_model(spec: Spec) -> tuple[str, str | None] | None:
    """Hub id and revision of a spec's model; None: it is from elsewhere."""
    source = ModelSource.parse(spec.model.source)
    return (source.name, spec.model.revision) if source.scheme == "hf" else None


def _config(spec: Spec, context: PlanningContext) -> Mapping[str, Any] | None:
    """The config.json of a spec's model, where it has been fetched."""
    model = _hub_model(spec)
    return context.configs(*model) if model else None
