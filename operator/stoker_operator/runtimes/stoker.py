"""Runtime stoker: Stoker's own engine. It is configured with the classes of its own command line."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from functools import cache
from typing import Any

from stoker_common.errors import ArgumentError
from stoker_engine.contract.argv import Parser, flag_name
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.contract.serve_args import ServeArgs
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

#: Defaults for pods. The server restarts a dead engine a few times an hour and keeps listening meanwhile. If the server
#: exited, connections would be refused until all nodes have noticed that.
_DEFAULTS: dict[str, Any] = {"max_engine_restarts": 3}

#: Argument that ``spec.engine.args`` must not have → what to do instead.
_NOT_THE_USERS: dict[str, str] = {
    "port": "remove it; see spec.service.port",
    **dict.fromkeys(
        ("nnodes", "node_rank", "headless", "master_addr", "master_port"),
        "remove it: a replica is one pod; set spec.replicas for more",
    ),
}

_NAMES = [field.name for cls in (EngineArgs, FrontendArgs) for field in dataclasses.fields(cls)]


class Stoker(Runtime):
    """Stoker's own engine. The image's entry point is ``stoker``."""

    name = "stoker"
    drains = True
    key_variable = "STOKER_API_KEY"
    reads_key_files = True
    local_args = ("--shutdown-grace=0",)  # no Service sends requests to a server that is stopping

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
        """See `Runtime.invocation`."""
        args = serve_args(spec, plan, chat_template=chat_template, api_keys=api_keys, host=host, port=port)
        return Invocation(("serve", *args.to_argv()), args.frontend.shutdown_grace)

    def arguments(self, spec: Spec) -> dict[str, Any]:
        """See `Runtime.arguments`."""
        return _parse(spec)

    def probes(self, spec: Spec) -> Probes:
        """See `Runtime.probes`.

        ``/live`` succeeds even before the model has been loaded, ``/ready`` only while requests may be sent.
        """
        return Probes(
            startup=Probe("/live", period=2, failures=60),
            liveness=Probe("/live", period=5, failures=3),
            readiness=Probe("/ready", period=2, failures=2),
        )


def serve_args(
    spec: Spec,
    plan: Plan,
    *,
    chat_template: str | None = None,
    api_keys: str | None = None,
    host: str | None = None,
    port: int = PORT,
) -> ServeArgs:
    """Return the arguments of ``stoker serve``; arguments and errors as for `Runtime.invocation`."""
    decided = decided_arguments(spec, plan, chat_template) | {
        "device": plan.placement.accelerator.device,
        "shutdown_timeout": spec.rollout.drain,
    }
    if api_keys is not None:
        decided["api_key_file"] = api_keys
    user_arguments = _parse(spec)
    for name, value in user_arguments.items():
        if name in decided and decided[name] != value:
            raise contradicts(flag_name(name), FIELDS[name], decided[name])
    values = {**_DEFAULTS, **user_arguments, **decided, "host": host or listening_address(user_arguments), "port": port}
    try:
        return ServeArgs(_build(EngineArgs, values), _build(FrontendArgs, values))
    except ArgumentError as error:
        name = error.argument.lstrip("-").replace("-", "_")
        field = FIELDS[name] if name in decided and name in FIELDS else "spec.engine.args"
        raise refused(str(error), field=field) from None


@cache
def _parser() -> Parser:
    return ServeArgs.parser()


def _parse(spec: Spec) -> dict[str, Any]:
    """Return only the arguments that ``spec.engine.args`` sets, without defaults."""
    words = spec.engine.args or []
    if any(word in ("-h", "--help") for word in words):
        raise refused("--help starts no engine", "remove it")
    absent = object()
    # argparse sets defaults only for missing attributes, so an attribute that is still `absent` was not given.
    namespace = argparse.Namespace(**dict.fromkeys(_NAMES, absent))
    try:
        _, unknown = _parser().parse_known_args(["MODEL", *words], namespace)
    except ArgumentError as error:
        raise refused(str(error), "see `stoker serve --help`") from None
    except SystemExit:
        raise refused("--help starts no engine", "remove it") from None
    if unknown:
        _refuse_unknown(unknown[0])
    arguments = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(namespace).items()
        if value is not absent and name != "model"
    }
    refuse_unreachable(arguments, _NOT_THE_USERS)
    return arguments


def _refuse_unknown(word: str) -> None:
    if not word.startswith("-"):
        raise refused(f"{word!r} is not the value of a flag", "remove it")
    flag = word.partition("=")[0]
    refuse_unreachable({flag.lstrip("-").replace("-", "_"): True}, _NOT_THE_USERS)
    if vllm_flags.find(flag):
        raise refused(
            f"{flag} is a flag of vLLM that runtime stoker does not have", "remove it, or set spec.engine.runtime: vllm"
        )
    close = difflib.get_close_matches(flag, map(flag_name, _NAMES), n=1, cutoff=0.75)
    raise refused(f"there is no flag {flag}", f"did you mean {close[0]}?" if close else "see `stoker serve --help`")


def _build(cls: type[Any], values: dict[str, Any]) -> Any:
    return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values})
