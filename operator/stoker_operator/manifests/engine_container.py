"""The container that runs the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.v1alpha1.template import ENGINE_CONTAINER
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.manifests.storage import CACHE_ENV, Volume
from stoker_operator.manifests.variables import escape
from stoker_operator.objects.owner import Manifest
from stoker_operator.plan.placement import Placement
from stoker_operator.plan.planner import Plan
from stoker_operator.runtimes.registry import runtime
from stoker_operator.runtimes.runtime import PORT, Invocation, Probe, Runtime

#: Entry of the Secret with the API key, for runtimes that accept only one, such as vLLM.
API_KEY: Final = "api-key"


def engine_container(spec: Spec, plan: Plan, started: Invocation, mounted: Sequence[Volume], leaving: int) -> Manifest:
    """Return the engine's container.

    Args:
        spec: the endpoint's spec, as its author wrote it.
        plan: its plan.
        started: the engine's invocation.
        mounted: the pod's volumes.
        leaving: time in seconds for which a terminating pod still processes requests.

    Raises:
        Refused: two fields set the same environment variable.
    """
    engine = runtime(spec.engine.runtime)
    container: Manifest = {"name": ENGINE_CONTAINER, "image": plan.image}
    if engine.command:
        container["command"] = list(engine.command)
    container |= {
        "args": [escape(word) for word in started.words],
        "env": _env(spec, engine),
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
        **_probes(spec, engine),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # If a failed engine has written no termination message, the end of its log is used.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [volume.volume_mount() for volume in mounted],
    }
    if not engine.drains:
        # A terminating pod finishes its requests in this time; then the engine gets SIGTERM.
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": leaving}}}
    if spec.engine.image_pull_policy:
        container["imagePullPolicy"] = spec.engine.image_pull_policy
    resources = _resources(spec, plan.placement)
    if resources:
        container["resources"] = resources
    return container


def _env(spec: Spec, engine: Runtime) -> list[Manifest]:
    """Return the operator's variables, then the user's, which may replace the operator's defaults."""
    secrets: dict[str, tuple[str, str, str]] = {}
    token = spec.model.token_secret_ref
    if token:
        secrets["HF_TOKEN"] = (token.name, token.key, "spec.model.tokenSecretRef")
    if spec.auth and not engine.reads_key_files:
        secrets[engine.key_variable] = (spec.auth.api_keys_secret_ref.name, API_KEY, "spec.auth.apiKeysSecretRef")
    user_env = [variable.model_dump(by_alias=True, exclude_none=True) for variable in spec.engine.env or []]
    for variable in user_env:
        if variable["name"] in secrets:
            field = secrets[variable["name"]][2]
            raise Refused(
                Violation("spec.engine.env", f"{field} already sets {variable['name']}", "remove one of them")
            )
    # The API server stores an empty value as an absent one.
    user_env = [{key: value for key, value in variable.items() if value != ""} for variable in user_env]
    names = {variable["name"] for variable in user_env}
    defaults = {**CACHE_ENV, **engine.env}
    return [
        *({"name": name, "value": value} for name, value in defaults.items() if name not in names),
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
            for name, (secret, key, _) in secrets.items()
        ),
        *user_env,
    ]


def _probes(spec: Spec, engine: Runtime) -> Manifest:
    tls = engine.speaks_tls(spec)

    def manifest_of(probe: Probe) -> Manifest:
        get: Manifest = {"path": probe.path, "port": "http"}
        if tls:
            get["scheme"] = "HTTPS"
        return {
            "httpGet": get,
            "timeoutSeconds": 5,
            "periodSeconds": probe.period,
            "failureThreshold": probe.failures,
        }

    probes = engine.probes(spec)
    return {
        "startupProbe": manifest_of(probes.startup),
        "livenessProbe": manifest_of(probes.liveness),
        "readinessProbe": manifest_of(probes.readiness),
    }


def _resources(spec: Spec, placement: Placement) -> Manifest:
    requested = spec.hardware.resources
    amounts: dict[str, dict[str, Any]] = {
        "limits": dict(requested.limits or {}) if requested else {},
        "requests": dict(requested.requests or {}) if requested else {},
    }
    if placement.accelerator.resource:
        amounts["limits"][placement.accelerator.resource] = placement.count
    resources: Manifest = {
        kind: {name: str(amount) for name, amount in each.items()} for kind, each in amounts.items() if each
    }
    if requested and requested.claims:
        resources["claims"] = [each.model_dump(by_alias=True, exclude_none=True) for each in requested.claims]
    return resources
