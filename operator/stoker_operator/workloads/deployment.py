"""Deployments as workloads: each pod is a replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from stoker_operator.objects.facts import Child, Halt, Object, Rollout
from stoker_operator.objects.owner import Manifest, Owner
from stoker_operator.workloads.kind import PodSet, Resource, WorkloadKind


class DeploymentKind(WorkloadKind):
    """One Deployment per workload."""

    resource: ClassVar = Resource("Deployment", "apps", "v1", "deployments")

    def objects(self, pods: PodSet, live: Mapping[Child, Object]) -> tuple[Manifest, ...]:
        rollout = pods.rollout
        deployment: Manifest = {
            "apiVersion": self.resource.api_version,
            "kind": self.resource.kind,
            "metadata": self.metadata(pods.owner),
            "spec": {
                "replicas": pods.replicas,
                "selector": {"matchLabels": pods.owner.selector()},
                "strategy": {
                    "type": "RollingUpdate",
                    "rollingUpdate": {"maxSurge": rollout.surge, "maxUnavailable": rollout.unavailable},
                },
                # The limit must include the first start's download of the weights.
                "progressDeadlineSeconds": rollout.startup_timeout,
                "template": pods.template,
            },
        }
        return (deployment,)

    def templates(self, body: Object) -> tuple[Manifest, ...]:
        template = body.get("spec", {}).get("template")
        return (template,) if template else ()

    def with_templates(self, body: Manifest, templates: Sequence[Manifest]) -> Manifest:
        (template,) = templates
        return {**body, "spec": {**body["spec"], "template": template}}

    def rollout(self, objects: Sequence[Object]) -> Rollout:
        (deployment,) = objects
        status: Any = deployment.get("status") or {}
        conditions = _conditions(deployment)
        progress = conditions.get("Progressing", {})
        return Rollout(
            current=status.get("observedGeneration", 0) >= deployment["metadata"]["generation"],
            desired=deployment["spec"]["replicas"],
            total=status.get("replicas", 0),
            updated=status.get("updatedReplicas", 0),
            ready=status.get("readyReplicas", 0),
            available=status.get("availableReplicas", 0),
            failure=_refusal(conditions),
            overdue=progress.get("reason") == "ProgressDeadlineExceeded",
            halted=_PAUSED if deployment["spec"].get("paused") else None,
            served=progress.get("reason") == "NewReplicaSetAvailable",
        )

    def has_served(self, live: Object) -> bool:
        status: Any = live.get("status") or {}
        if status.get("readyReplicas") or status.get("availableReplicas"):
            return True
        return bool(_conditions(live).get("Progressing", {}).get("reason") == "NewReplicaSetAvailable")

    def pod_version(self, pod: Object, objects: Sequence[Object]) -> str:
        return str((pod["metadata"].get("labels") or {}).get("pod-template-hash", ""))

    def selects(self, owner: Owner, live: Object) -> bool:
        return not owner.component and bool(live["spec"]["selector"].get("matchLabels") == owner.selector())


#: The only instance; it has no state.
DEPLOYMENT: Final = DeploymentKind()

_PAUSED: Final = Halt(
    reason="DeploymentPaused",
    message="the endpoint's Deployment is paused, so its pods do not change; resume it with "
    "kubectl rollout resume deployment",
)


def _conditions(deployment: Object) -> dict[str, Object]:
    status: Any = deployment.get("status") or {}
    return {each["type"]: each for each in status.get("conditions") or ()}


def _refusal(conditions: Mapping[str, Object]) -> str:
    """Return why pods or their ReplicaSet cannot be created; empty without a failure."""
    failure, progress = conditions.get("ReplicaFailure", {}), conditions.get("Progressing", {})
    if failure.get("status") == "True":
        return str(failure.get("message") or failure.get("reason"))
    if progress.get("status") == "False" and progress.get("reason") != "ProgressDeadlineExceeded":
        return str(progress.get("message") or progress.get("reason"))
    return ""
