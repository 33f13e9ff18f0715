"""All the objects of an endpoint, in the order in which they are applied."""

from __future__ import annotations

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.manifests.deployment import deployment
from stoker_operator.manifests.disruption_budget import disruption_budget
from stoker_operator.manifests.network_policy import network_policy
from stoker_operator.manifests.pod_monitor import pod_monitor
from stoker_operator.manifests.service import service
from stoker_operator.manifests.service_account import service_account
from stoker_operator.manifests.storage import claim
from stoker_operator.objects.owner import Manifest, Owner
from stoker_operator.plan.planner import Plan
from stoker_operator.policy.policy import PERMISSIVE, Policy
from stoker_operator.settings import GatewaySettings


def children(
    owner: Owner,
    spec: Spec,
    plan: Plan,
    *,
    pod_monitors: bool = False,
    policy: Policy = PERMISSIVE,
    gateway: GatewaySettings | None = None,
) -> tuple[Manifest, ...]:
    """The objects that should exist for `spec`; what pods need comes before them.

    Args:
        owner: the endpoint.
        spec: the endpoint's, as its author wrote it.
        plan: what was decided about it.
        pod_monitors: whether the cluster has PodMonitors.
        policy: what the administrator permits and adds.
        gateway: the one that serves the endpoint; None: none does.

    Raises:
        Refused: ``spec.engine.args``, ``spec.template`` or ``spec.monitoring`` cannot be honoured.
    """
    pods = deployment(owner, spec, plan, policy)
    objects = (
        service_account(owner),
        claim(owner, spec),
        service(owner, spec),
        network_policy(owner, spec, policy, gateway),
        disruption_budget(owner, spec),
        pods,
        pod_monitor(owner, spec, pod_monitors, policy),
    )
    return tuple(each for each in objects if each is not None)
