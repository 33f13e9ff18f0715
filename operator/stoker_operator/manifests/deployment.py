"""The Deployment that keeps an endpoint's pods running."""

from __future__ import annotations

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.manifests.pod_template import pod_template
from stoker_operator.objects.owner import OPERATOR, Manifest, Owner
from stoker_operator.plan.planner import Plan
from stoker_operator.policy.policy import PERMISSIVE, Policy


def deployment(owner: Owner, spec: Spec, plan: Plan, policy: Policy = PERMISSIVE) -> Manifest:
    """The endpoint's Deployment.

    Raises:
        Refused: as `pod_template`.
    """
    metadata = owner.metadata()
    if owner.operator:
        metadata["annotations"] = {OPERATOR: owner.operator}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": spec.replicas,
            "selector": {"matchLabels": owner.selector()},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {
                    "maxSurge": spec.rollout.surge,
                    "maxUnavailable": spec.rollout.unavailable,
                },
            },
            # The first start downloads the weights.
            "progressDeadlineSeconds": spec.rollout.startup_timeout,
            "template": pod_template(owner, spec, plan, policy),
        },
    }
