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
            # An hour: the first start downloads the weights. A stage of loading that is stuck is found by /live.
            "progressDeadlineSeconds": 3600,
            "template": {
                "metadata": {"labels": owner.labels()},
                "spec": {
                    "serviceAccountName": owner.name,
                    "automountServiceAccountToken": False,
                    # A Service called `hf` would otherwise set HF_PORT and the like in every pod around it.
                    "enableServiceLinks": False,
                    # On SIGTERM the engine serves on for --shutdown-grace, then lets requests in flight finish for
                    # --shutdown-timeout; what is left of this is for the process to end.
                    "terminationGracePeriodSeconds": 45,
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
