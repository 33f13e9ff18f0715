"""The Deployment that keeps an endpoint's pods running."""

from __future__ import annotations

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.manifests.engine_container import engine_container
from stoker_operator.manifests.owner import Manifest, Owner
from stoker_operator.manifests.storage import volumes
from stoker_operator.plan.planner import Plan


def deployment(owner: Owner, spec: Spec, plan: Plan) -> Manifest:
    """The endpoint's Deployment."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": owner.metadata(),
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
            # A pod may take as long as its startup probe allows before anyone calls it stuck.
            "progressDeadlineSeconds": 3660,
            "template": {
                "metadata": {"labels": owner.labels()},
                "spec": {
                    "serviceAccountName": owner.name,
                    "automountServiceAccountToken": False,
                    # A Service called `hf` would otherwise set HF_PORT and the like in every pod around it.
                    "enableServiceLinks": False,
                    "securityContext": {
                        "runAsNonRoot": True,
                        "seccompProfile": {"type": "RuntimeDefault"},
                        # Makes a claim's volume writable for whatever user the image runs as.
                        "fsGroup": 65532,
                        "fsGroupChangePolicy": "OnRootMismatch",
                    },
                    "containers": [engine_container(spec, plan)],
                    "volumes": [volume.volume() for volume in volumes(spec, plan.placement)],
                },
            },
        },
    }
