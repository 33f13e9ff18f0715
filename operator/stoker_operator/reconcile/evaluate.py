"""A manifest → what its objects will be, or all objections to it. Pure.

Admission and reconcile both judge by this, so that they cannot come to different verdicts: admission saves the user
the wait, and reconcile needs no admission.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stoker_common.model_source import ModelSource
from stoker_operator.api.manifest import parse
from stoker_operator.api.v1alpha1 import InferenceEndpoint, Spec
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.manifests.children import children
from stoker_operator.objects.facts import Object
from stoker_operator.objects.owner import Manifest, Owner
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.planner import Plan, Unplannable, plan, planned_ways_out
from stoker_operator.policy.policy import PERMISSIVE, Policy
from stoker_operator.policy.template_policy import forbidden
from stoker_operator.reconcile.routing import Route

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
    """

    catalogue: Catalogue
    configs: Configs = lambda _id, _revision: None
    pod_monitors: bool = False
    policy: Policy = PERMISSIVE
    pending: Callable[[str, str | None], bool] = lambda _id, _revision: False
    route: Route | None = None


@dataclass(frozen=True)
class Evaluation:
    """What is made of a manifest.

    Attributes:
        parsed: the endpoint, where the manifest can be read.
        plan: what its pods will be.
        objects: what should exist for it; empty where there is an objection.
        refused: objections to the manifest itself.
        unplannable: objections to any plan for it.
        awaited: hub id and revision of its model, where the description is being fetched that may change all of this.
    """

    parsed: InferenceEndpoint | None = None
    plan: Plan | None = None
    objects: tuple[Manifest, ...] = ()
    refused: tuple[Violation, ...] = ()
    unplannable: tuple[Violation, ...] = ()
    awaited: tuple[str, str | None] | None = None

    @property
    def violations(self) -> tuple[Violation, ...]:
        """All objections to it."""
        return self.refused + self.unplannable


def evaluate(owner: Owner, document: Object, context: PlanningContext, before: Object | None = None) -> Evaluation:
    """Judges the manifest `document` of the endpoint `owner`, as a change of `before` where that is given."""
    try:
        parsed = parse(document, before)
    except Refused as refused:
        against = refused.violations
        return Evaluation(
            refused=planned_ways_out(document, against, context.catalogue, lambda spec: _config(spec, context))
        )
    spec = parsed.spec
    if against := forbidden(spec.template, context.policy.template):
        return Evaluation(parsed, refused=against)
    config, model = _config(spec, context), _hub_model(spec)
    awaited = model if model and config is None and context.pending(*model) else None
    try:
        planned = plan(spec, context.catalogue, config)
    except Unplannable as refused:
        return Evaluation(parsed, unplannable=refused.violations)
    except Refused as refused:
        return Evaluation(parsed, refused=refused.violations)
    gateway = context.route.gateway if context.route else None
    monitors, policy = context.pod_monitors, context.policy
    try:
        objects = children(owner, spec, planned, pod_monitors=monitors, policy=policy, gateway=gateway)
    except Refused as refused:
        return Evaluation(parsed, planned, refused=refused.violations)
    return Evaluation(parsed, planned, objects, awaited=awaited)


def _hub_model(spec: Spec) -> tuple[str, str | None] | None:
    """Hub id and revision of a spec's model; None: it is from elsewhere."""
    source = ModelSource.parse(spec.model.source)
    return (source.name, spec.model.revision) if source.scheme == "hf" else None


def _config(spec: Spec, context: PlanningContext) -> Mapping[str, Any] | None:
    """The config.json of a spec's model, where it has been fetched."""
    model = _hub_model(spec)
    return context.configs(*model) if model else None
