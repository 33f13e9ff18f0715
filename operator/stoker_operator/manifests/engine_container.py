"""The container that runs the engine."""

from __future__ import annotations

from typing import Any

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.manifests.engine_argv import PORT, serve_args
from stoker_operator.manifests.owner import Manifest
from stoker_operator.manifests.storage import CACHE_ENV, TEMPLATE_FILE, TEMPLATE_MOUNT, volumes
from stoker_operator.manifests.variables import escape
from stoker_operator.plan.placement import Placement
from stoker_operator.plan.planner import Plan


def engine_container(spec: Spec, plan: Plan) -> Manifest:
    """The engine's container. The image's entry point is ``stoker``."""
    words = ["serve", *serve_args(spec, plan.placement, chat_template=_chat_template(spec)).to_argv()]
    container: Manifest = {
        "name": "engine",
        "image": plan.image,
        "args": [escape(word) for word in words],
        "env": _env(spec),
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
        **_probes(),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # An engine that gives up says why in its last lines; they become the pod's and the endpoint's message.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [volume.volume_mount() for volume in volumes(spec, plan.placement)],
    }
    if spec.engine.image_pull_policy:
        container["imagePullPolicy"] = spec.engine.image_pull_policy
    resources = _resources(spec, plan.placement)
    if resources:
        container["resources"] = resources
    return container


def _chat_template(spec: Spec) -> str | None:
    """The template's text, or the file it is mounted as."""
    template = spec.model.chat_template
    if template is None:
        return None
    return template.value or f"{TEMPLATE_MOUNT}/{TEMPLATE_FILE}"


def _env(spec: Spec) -> list[Manifest]:
    theirs = [variable.model_dump(by_alias=True, exclude_none=True) for variable in spec.engine.env or []]
    # An empty value is the absence of one, and that is how the API server stores it.
    theirs = [{key: value for key, value in variable.items() if value != ""} for variable in theirs]
    names = {variable["name"] for variable in theirs}
    ours = [{"name": name, "value": value} for name, value in CACHE_ENV.items() if name not in names]
    return ours + theirs


def _probes() -> Manifest:
    """The server answers ``/live`` from its first second, while it loads too; ``/ready`` once the model is loaded and
    until the pod is to end."""

    def get(path: str) -> Manifest:
        return {"httpGet": {"path": path, "port": "http"}, "timeoutSeconds": 5}

    return {
        "startupProbe": {**get("/live"), "periodSeconds": 2, "failureThreshold": 60},
        "livenessProbe": {**get("/live"), "periodSeconds": 5, "failureThreshold": 3},
        "readinessProbe": {**get("/ready"), "periodSeconds": 2, "failureThreshold": 2},
    }


def _resources(spec: Spec, placement: Placement) -> Manifest:
    given = spec.hardware.resources
    resources: dict[str, dict[str, Any]] = {
        "limits": dict(given.limits or {}) if given else {},
        "requests": dict(given.requests or {}) if given else {},
    }
    if placement.accelerator.resource:
        resources["limits"][placement.accelerator.resource] = placement.count
    return {
        kind: {name: str(amount) for name, amount in amounts.items()} for kind, amounts in resources.items() if amounts
    }
