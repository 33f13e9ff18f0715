"""Runtime vllm, which runs ``vllm serve``.

The entry point of vLLM's images differs between versions and builds, so the command is set. The images run as root
unless the pod sets a user; the program does not need root, but torch looks up the user's name. The engine communicates
with its workers through 160 MiB of shared memory, on CPUs even with one worker; a container's default is 64 MiB.
"""

from __future__ import annotations

import argparse
import difflib
import math
from typing import Any, ClassVar, Final

from stoker_common.errors import ArgumentError
from stoker_engine.contract.argv import flag_name, human_int
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.plan.planner import Plan
from stoker_operator.runtimes import vllm_flags
from stoker_operator.runtimes.arguments import FIELDS, decided_arguments
from stoker_operator.runtimes.runtime import (
    PORT,
    Invocation,
    Probe,
    Probes,
    Runtime,
    contradicts,
    listening_address,
    refuse_unreachable,
    refused,
)

#: Argument that ``spec.engine.args`` must not have → what to do instead.
_NOT_THE_USERS: Final = {
    "port": "remove it; see spec.service.port",
    "uds": "remove it; see spec.service.port",
    "headless": "remove it",
    "grpc": "remove it",
    "nnodes": "remove it; see spec.hardware.nodes",
    "node_rank": "remove it; see spec.hardware.nodes",
    "shutdown_timeout": "set spec.rollout.drainSeconds",
}
_SYNONYMS: Final = {"half": "float16", "float": "float32"}
_STARTUP_PERIOD: Final = 10


class Vllm(Runtime):
    """vLLM."""

    name = "vllm"
    command = ("vllm",)
    key_variable = "VLLM_API_KEY"
    needs_shm = True
    user = 65532
    env: ClassVar[dict[str, str]] = {"USER": "vllm"}

    def invocation(
        self,
        spec: Spec,
        plan: Plan,
        *,
        chat_template: str | None = None,
        api_keys: str | None = None,
        host: str | None = None,
        port: int = PORT,
    ) -> Invocation:
        """See `Runtime.invocation`.

        Unknown flags are refused, unless the user sets an image, which may have another version than `vllm_flags`.
        """
        assert api_keys is None, "vLLM reads no key files"
        decided = decided_arguments(spec, plan, chat_template)
        if spec.model.source.startswith("demo://"):
            raise refused(
                "only Stoker's own image contains the demo model",
                "use runtime stoker, or a model of the hub",
                field="spec.model.source",
            )
        user_arguments = _parse(spec)
        for name, value in user_arguments.items():
            if name in decided and _read(name, value, decided[name]) != decided[name]:
                raise contradicts(flag_name(name), FIELDS[name], decided[name])
        cache = _cpu_cache(plan)
        if cache and "kv_cache_memory_bytes" not in user_arguments:
            decided["kv_cache_memory_bytes"] = cache
        user_words = spec.engine.args or []
        words = [*_words(decided), f"--host={host or listening_address(user_arguments)}", f"--port={port}", *user_words]
        if host and "host" in user_arguments:  # vLLM uses the last one
            words.append(f"--host={host}")
        return Invocation(("serve", *words))

    def arguments(self, spec: Spec) -> dict[str, str | bool | list[str]]:
        """See `Runtime.arguments`."""
        return _parse(spec)

    def probes(self, spec: Spec) -> Probes:
        """See `Runtime.probes`. vLLM does not answer ``/health`` until the model is loaded."""
        return Probes(
            startup=Probe("/health", _STARTUP_PERIOD, math.ceil(spec.rollout.startup_timeout / _STARTUP_PERIOD)),
            liveness=Probe("/health", period=10, failures=3),
            readiness=Probe("/health", period=5, failures=2),
        )


def _cpu_cache(plan: Plan) -> int | None:
    """Return the size of a CPU rank's KV cache in bytes, or None on accelerators and if it is unknown.

    vLLM's own default is computed from the node's memory instead of the container's.
    """
    if plan.placement.accelerator.resource is not None or plan.estimate is None:
        return None
    return plan.estimate.kv_bytes_per_gpu


def _words(decided: dict[str, Any]) -> list[str]:
    """Return the command line of the decided arguments, without those that are vLLM's default in every version."""
    words = [decided["model"], flag_name("served_model_name"), *decided["served_model_name"]]
    for name, value in decided.items():
        if name in ("model", "served_model_name") or (name != "enable_prefix_caching" and value in (False, "auto")):
            continue
        if name.endswith("_parallel_size") and value == 1:
            continue
        if isinstance(value, bool):
            words.append(flag_name(name) if value else f"--no-{flag_name(name)[2:]}")
        else:
            # One word, so that a value that starts with a dash is not parsed as a flag.
            words.append(f"{flag_name(name)}={value}")
    return words


def _parse(spec: Spec) -> dict[str, str | bool | list[str]]:
    """Return the values in ``spec.engine.args``, by argument."""
    words = spec.engine.args or []
    if any(word in ("-h", "--help") or word.startswith("--help=") for word in words):
        raise refused("--help starts no engine", "remove it")
    try:
        arguments, unknown = vllm_flags.parse(words)
    except ArgumentError as error:
        raise refused(str(error), "see `vllm serve --help=all`") from None
    if unknown and spec.engine.image is None:
        _refuse_unknown(unknown[0])
    refuse_unreachable(arguments, _NOT_THE_USERS)
    if "api_key" in arguments and spec.auth:
        raise refused("--api-key would override spec.auth.apiKeysSecretRef", "remove one of the two")
    return arguments


def _refuse_unknown(word: str) -> None:
    if not word.startswith("-"):
        raise refused(f"{word!r} is not the value of a flag", "remove it")
    flag = word.partition("=")[0]
    close = difflib.get_close_matches(
        flag, [name for flag in vllm_flags.flags() for name in flag.names], n=1, cutoff=0.75
    )
    hint = f"did you mean {close[0]}?" if close else "see `vllm serve --help=all`."
    raise refused(
        f"vLLM {vllm_flags.VERSION} has no flag {flag}",
        f"{hint} If another version has it, set that version's image in spec.engine.image",
    )


def _read(name: str, value: str | bool | list[str], like: Any) -> Any:
    """Convert the value of a flag to the type of `like`, the value that it is compared with."""
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, bool) or isinstance(like, str):
        return _SYNONYMS.get(str(value), value) if name == "dtype" else value
    try:
        return float(value) if isinstance(like, float) else human_int(value)
    except (ValueError, argparse.ArgumentTypeError):
        raise refused(f"{flag_name(name)}: {value!r} is not a number", f"set {FIELDS[name]}") from None
