"""All objects of an endpoint's workload, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Mapping

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.manifests.disruption_budget import disruption_budget
from stoker_operator.manifests.network_policy import network_policy
from stoker_operator.manifests.pod_monitor import pod_monitor
from stoker_operator.manifests.pod_template import pod_template
from stoker_operator.manifests.service import service
from stoker_operator.manifests.service_account import service_account
from stoker_operator.manifests.storage import claim
from stoker_operator.objects.facts import MAIN, Child, Object
from stoker_operator.objects.owner import Manifest, Owner
from stoker_operator.plan.planner import Plan
from stoker_operator.policy.policy import PERMISSIVE, Policy
from stoker_operator.settings import GatewaySettings
from stoker_operator.workloads.composition import Role
from stoker_operator.workloads.deployment import DEPLOYMENT
from stoker_operator.workloads.kind import PodSet, WorkloadKind


def children(
    owner: Owner,
    spec: Spec,
    plan: Plan,
    *,
    kind: WorkloadKind = DEPLOYMENT,
    role: Role = Role.SERVING,
    live: Mapping[Child, Object] | None = None,
    pod_monitors: bool = False,
    policy: Policy = PERMISSIVE,
    gateway: GatewaySettings | None = None,
    replicas: int | None = None,
) -> tuple[Manifest, ...]:
    """Return the objects that should exist for a workload; objects that pods need come before those that run the pods.

    Args:
        owner: the endpoint, with the workload's name.
        spec: the workload's spec; if there is only one workload, the endpoint's spec as its author wrote it.
        plan: its plan.
        kind: the kind of object that runs the pods.
        role: the pods' role. Only the serving workload has a Service and a PodDisruptionBudget.
        live: the workload's existing objects of that kind.
        pod_monitors: whether the cluster has PodMonitors.
        policy: the administrator's permissions and additions.
        gateway: the gateway that serves the endpoint, if any.
        replicas: desired number of replicas; None for the number that a new endpoint gets.

    Raises:
        Refused: a field of the spec cannot be applied.
    """
    count = spec.first_replicas if replicas is None else replicas
    pods = PodSet(owner, count, spec.rollout, pod_template(owner, spec, plan, policy))
    endpoint, serves = owner.of(MAIN), role is Role.SERVING
    objects = (
        service_account(owner),
        claim(owner, spec),
        service(endpoint, spec, kind.request_pods(owner)) if serves else None,
        network_policy(owner, spec, policy, gateway),
        disruption_budget(endpoint, spec, owner.selector()) if serves else None,
        *kind.objects(pods, live or {}),
        pod_monitor(owner, spec, pod_monitors, policy),
    )
    return tuple(each for each in objects if each is not None)
