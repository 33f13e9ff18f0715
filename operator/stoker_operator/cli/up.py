"""``stoker up -f FILE``: runs a manifest without a cluster.

The operator's own code validates and plans the manifest and builds the engine's command line. Fields that only a
cluster can use are listed and ignored, or refused if the engine needs them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stoker_common.command_parser import CommandParser
from stoker_common.model_source import ModelSource
from stoker_common.subprocesses.host_memory import host_memory
from stoker_operator.api.quantity import amount
from stoker_operator.api.rule import violations
from stoker_operator.api.v1alpha1 import InferenceEndpoint, Spec
from stoker_operator.api.v1alpha1.hardware import CPU, Hardware
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.cli.local_config import local_config, model_exists
from stoker_operator.cli.machine import lacks
from stoker_operator.cli.manifest_file import add_arguments, answer, load_one
from stoker_operator.manifests.variables import expand
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.planner import Plan, plan
from stoker_operator.runtimes.registry import runtime
from stoker_operator.runtimes.runtime import Runtime

#: Fields that have an effect only in a cluster.
CLUSTER_FIELDS = (
    "replicas",
    "scaling",
    "hardware.resources",
    "engine.image",
    "engine.image_pull_policy",
    "template",
    "storage",
    "service",
    "rollout.max_surge",
    "rollout.max_unavailable",
    "rollout.startup_timeout_seconds",
    "rollout.image_updates",
    "network_policy",
    "monitoring",
    "routing",
)

#: The field of which a CPU's memory limit has an effect on one machine, too.
RESOURCES: Final = "spec.hardware.resources"

#: Maximum number of characters of an argument, such as a chat template, in the printed command.
SHOWN: Final = 120


def main(argv: list[str]) -> int:
    """Run the command. It does not return if the engine starts, because the engine replaces this process."""
    parser = CommandParser(
        prog="stoker up", description="Run an InferenceEndpoint manifest on this machine, without a cluster."
    )
    add_arguments(parser)
    parser.add_argument("--accelerator", choices=(CPU,), help="run on this accelerator instead of the manifest's")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    options = parser.parse_args(argv)
    if not 0 <= options.port <= 65535:
        parser.error(f"--port must be 0 to 65535, not {options.port}")

    def run() -> int:
        catalogue = Catalogue.load(options.catalogue)
        launch = prepare(load_one(options.filename, catalogue), catalogue, options, os.environ)
        if launch.unused:
            print(f"Not used on one machine: {', '.join(launch.unused)}", flush=True)
        for warning in launch.warnings:
            print(f"Warning: {warning}", flush=True)
        print(f"{launch.name}: {shlex.join([launch.runtime, *map(shortened, launch.words)])}", flush=True)
        # The engine replaces this process, so signals reach it and the exit code is its own.
        os.execve(launch.program[0], [*launch.program, *launch.words], launch.env)

    return answer("up", run)


@dataclass(frozen=True)
class Launch:
    """The engine process to start.

    Attributes:
        name: name of the endpoint.
        runtime: name of the runtime.
        program: the runtime's executable and its fixed arguments.
        words: the other arguments.
        env: the whole environment of the process.
        unused: fields of the manifest that have no effect on one machine.
        warnings: the plan's warnings, for the manifest's author.
    """

    name: str
    runtime: str
    program: list[str]
    words: list[str]
    env: dict[str, str]
    unused: list[str]
    warnings: tuple[str, ...] = ()


def prepare(
    endpoint: InferenceEndpoint, catalogue: Catalogue, options: argparse.Namespace, environment: Mapping[str, str]
) -> Launch:
    """Validate and plan the manifest for this machine, and return the process to start.

    Raises:
        Refused: the manifest cannot run on this machine.
    """
    spec = endpoint.spec
    unused = [f"spec.{camel(name)}" for name in CLUSTER_FIELDS if is_set(spec, name)]
    if options.accelerator == CPU and spec.hardware.accelerator != CPU:
        set_fields = spec.model_fields_set | {f"hardware.{name}" for name in spec.hardware.model_fields_set}
        names = ("hardware.count", "hardware.nodes", "hardware.allow_idle", "parallelism")
        unused += [f"spec.{camel(name)}" for name in names if name in set_fields]
        spec = on_cpu(spec)
    stays_in_the_cluster(spec)
    model_exists(spec.model.source, "spec.model.source")
    engine = runtime(spec.engine.runtime)
    planned = plan_here(spec, catalogue)
    placement = planned.placement
    problem = lacks(spec.hardware.accelerator, placement.accelerator, placement.count)
    if problem:
        raise Refused(Violation("spec.hardware.accelerator", problem, "run it on the CPU with --accelerator cpu"))
    template = spec.model.chat_template.value if spec.model.chat_template else None
    unused = [each for name in unused for each in (unused_resources(spec, planned) if name == RESOURCES else [name])]
    words = [*engine.local_args, *kv_cache_args(spec, planned), *(spec.engine.args or [])]
    settings = spec.engine.model_copy(update={"args": words or None})
    started = engine.invocation(
        spec.model_copy(update={"engine": settings}),
        planned,
        chat_template=template,
        host=options.host,
        port=options.port,
    )
    variables = env(spec, engine, environment)
    return Launch(
        endpoint.metadata.name, engine.name, program(engine), list(started.words), variables, unused, planned.warnings
    )


def shortened(word: str) -> str:
    """Return the first line of an argument, at most `SHOWN` characters, with an ellipsis if that is not all of it."""
    line = word.partition("\n")[0][:SHOWN]
    return word if line == word else f"{line}…"


def plan_here(spec: Spec, catalogue: Catalogue) -> Plan:
    """Return the plan, also for a runtime that has no image for the accelerator.

    Raises:
        Refused: the spec has no valid plan.
    """
    engine = spec.engine.model_copy(update={"image": spec.engine.image or "none"})
    return plan(spec.model_copy(update={"engine": engine}), catalogue, local_config(spec))


def memory_limit(spec: Spec) -> int | None:
    """Return the memory limit in bytes of a container on a CPU; None without one, and on accelerators."""
    resources = spec.hardware.resources
    limit = (resources.limits or {}).get("memory") if resources else None
    return int(amount(limit)) if limit is not None and spec.hardware.accelerator == CPU else None


def kv_cache_args(spec: Spec, planned: Plan) -> list[str]:
    """Return the flag that makes the KV cache as large as in a pod with the spec's memory limit.

    In a pod, Stoker's engine derives that size from the container's limit. On this machine there is no such limit, so
    that the cache could be larger than planned. If the limit exceeds the machine's memory, the engine derives the size
    from that.
    """
    limit, estimate = memory_limit(spec), planned.estimate
    if spec.engine.runtime != "stoker" or limit is None or limit >= host_memory() or estimate is None:
        return []  # vLLM always gets the planned size on a CPU
    return [] if estimate.kv_bytes_per_gpu is None else [f"--kv-cache-memory-bytes={estimate.kv_bytes_per_gpu}"]


def unused_resources(spec: Spec, planned: Plan) -> list[str]:
    """Return the parts of ``spec.hardware.resources`` that have no effect: all but the memory limit that the plan of a
    CPU uses."""
    resources = spec.hardware.resources
    if resources is None or memory_limit(spec) is None or planned.estimate is None:
        return [RESOURCES]
    limits = [f"{RESOURCES}.limits[{name}]" for name in resources.limits or {} if name != "memory"]
    return limits + [f"{RESOURCES}.{name}" for name in ("requests", "claims") if getattr(resources, name)]


def program(engine: Runtime) -> list[str]:
    """Return the command that runs the runtime on this machine.

    Raises:
        Refused: the runtime is not installed.
    """
    if not engine.command:
        return [sys.executable, "-m", "stoker"]
    found = shutil.which(engine.command[0])
    if found is None:
        raise Refused(
            Violation(
                "spec.engine.runtime",
                f"there is no program {engine.command[0]} on this machine's PATH",
                f"install {engine.name}, or use runtime stoker",
            )
        )
    return [found, *engine.command[1:]]


def on_cpu(spec: Spec) -> Spec:
    """Return the spec with this machine's CPU as its hardware, and without parallel sizes.

    Raises:
        Refused: another field is not allowed on a CPU.
    """
    hardware = Hardware(accelerator=CPU)
    changed = spec.model_copy(update={"hardware": hardware, "parallelism": None})
    broken = tuple(violations(changed, "spec"))
    if broken:
        raise Refused(*broken)
    return changed


def stays_in_the_cluster(spec: Spec) -> None:
    """Refuse a model or a chat template that only a cluster has."""
    if ModelSource.parse(spec.model.source).scheme == "pvc":
        raise Refused(
            Violation(
                "spec.model.source", "one machine has no PersistentVolumeClaims", "copy the model and use file:///PATH"
            )
        )
    template = spec.model.chat_template
    if template and template.config_map_key_ref:
        raise Refused(
            Violation(
                "spec.model.chatTemplate.configMapKeyRef",
                "one machine has no ConfigMaps",
                "put the template's text into spec.model.chatTemplate.value",
            )
        )


def env(spec: Spec, engine: Runtime, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with ``spec.engine.env`` added.

    Values that the manifest takes from the cluster, such as a token from a Secret, must be set in `environment`, unless
    they are optional.

    Raises:
        Refused: `environment` lacks such a value.
    """
    needed = {
        "HF_TOKEN": ("spec.model.tokenSecretRef", spec.model.token_secret_ref),
        engine.key_variable: ("spec.auth.apiKeysSecretRef", spec.auth),
    }
    for name, (field, secret) in needed.items():
        if secret and not environment.get(name):
            raise Refused(Violation(field, "one machine has no Secrets", f"set the environment variable {name}"))
    result = dict(environment)
    listed: dict[str, str] = {}
    for variable in spec.engine.env or []:
        if variable.value_from is None:
            listed[variable.name] = expand(variable.value or "", listed)
        elif variable.name in environment:
            listed[variable.name] = environment[variable.name]
        elif not variable.value_from.is_optional:
            raise Refused(
                Violation(
                    f"spec.engine.env[{variable.name}].valueFrom",
                    "there is no cluster to read the value from",
                    f"set the environment variable {variable.name} before `stoker up`",
                )
            )
    return result | listed


def is_set(spec: Spec, name: str) -> bool:
    """Return whether the manifest sets the field `name`, a dotted path in Python's spelling."""
    part: object = spec
    for step in name.split("."):
        if step not in part.model_fields_set:  # type: ignore[attr-defined]
            return False
        part = getattr(part, step)
    return True


def camel(name: str) -> str:
    """Convert ``engine.image_pull_policy`` to the manifest's spelling, ``engine.imagePullPolicy``."""
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)
