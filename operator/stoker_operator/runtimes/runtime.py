"""The interface between the operator and a runtime, which is an inference engine with its server.

An endpoint's typed fields mean the same under every runtime, so a runtime converts them into its own flags.
``spec.engine.args`` is for settings without a field: an argument may repeat a field's value but not contradict it,
because the plan is computed from the field.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from stoker_engine.contract.argv import flag_name
from stoker_engine.contract.frontend_args import EVERY_ADDRESS
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.plan.planner import Plan

#: Port on which an engine's server listens in a pod.
PORT: Final = 8000
_EVERY_IPV4: Final = "0.0.0.0"
#: Assumed time in seconds until all nodes and proxies have noticed a pod's termination; until then it gets requests.
SHUTDOWN_GRACE: Final = 5.0


@dataclass(frozen=True)
class Invocation:
    """The command line of an engine.

    Attributes:
        words: arguments after the program's name.
        grace: time after the start of termination in which new requests are still served, in seconds.
    """

    words: tuple[str, ...]
    grace: float = SHUTDOWN_GRACE


@dataclass(frozen=True)
class Probe:
    """An HTTP probe.

    Attributes:
        path: path of the HTTP request.
        period, failures: the kubelet's periodSeconds and failureThreshold.
    """

    path: str
    period: int
    failures: int


@dataclass(frozen=True)
class Probes:
    """The kubelet's probes of an engine."""

    startup: Probe
    liveness: Probe
    readiness: Probe


class Runtime(ABC):
    """The interface of a runtime.

    Attributes:
        name: its name in ``spec.engine.runtime``.
        command: its program in an image; empty for the image's entry point.
        metrics_path: path of its Prometheus metrics.
        drains: whether it shuts down gracefully by itself: after SIGTERM it accepts requests for a while, and then
            finishes them. Otherwise the pod's preStop hook waits.
        key_variable: environment variable from which it reads an API key.
        reads_key_files: whether it reads all API keys in a folder, so that a mounted Secret may change while it runs.
        needs_shm: whether its processes use shared memory even if the model is not split.
        user: user ID for images that would run as root; None if not needed.
        env: environment variables that its images need.
        local_args: arguments on a machine without a cluster, which ``spec.engine.args`` may override.
    """

    name: ClassVar[str]
    command: ClassVar[tuple[str, ...]] = ()
    metrics_path: ClassVar[str] = "/metrics"
    drains: ClassVar[bool] = False
    key_variable: ClassVar[str]
    reads_key_files: ClassVar[bool] = False
    needs_shm: ClassVar[bool] = False
    user: ClassVar[int | None] = None
    env: ClassVar[dict[str, str]] = {}
    local_args: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
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
        """Return the engine's command line.

        Args:
            spec, plan: the endpoint's spec and its plan.
            chat_template: the template's text, or the path of its file; None for the model's own.
            api_keys: folder with the API keys; None if there are none, or they are not in files.
            host: address to listen on; None for the one in ``spec.engine.args``, or all IPv6 and IPv4 addresses.
            port: port to listen on.

        Raises:
            Refused: ``spec.engine.args`` is not valid or contradicts a field, or the engine does not support the spec.
        """

    @abstractmethod
    def arguments(self, spec: Spec) -> Mapping[str, Any]:
        """Return the values in ``spec.engine.args``, by argument.

        Raises:
            Refused: an argument is not valid, or users must not set it.
        """

    @abstractmethod
    def probes(self, spec: Spec) -> Probes:
        """Return the kubelet's probes."""

    def speaks_tls(self, spec: Spec) -> bool:
        """Return whether the engine will serve HTTPS; False also if the arguments are refused."""
        try:
            return "ssl_certfile" in self.arguments(spec)
        except Refused:
            return False


def refused(message: str, remedy: str = "", *, field: str = "spec.engine.args") -> Refused:
    """Return the error that refuses `field`."""
    return Refused(Violation(field, message, remedy))


def refuse_unreachable(arguments: Mapping[str, Any], remedies: Mapping[str, str]) -> None:
    """Refuse arguments that would not work in an endpoint's pods.

    Args:
        arguments: arguments of ``spec.engine.args``.
        remedies: argument that users must not set → what to do instead.

    Raises:
        Refused: there is such an argument.
    """
    for name in arguments:
        if name in remedies:
            raise refused(f"{flag_name(name)} cannot be set for an endpoint", remedies[name])
    if str(arguments.get("ssl_cert_reqs")) == "2":
        raise refused("--ssl-cert-reqs=2 rejects the kubelet's probes, which have no certificate", "use 1")


def listening_address(arguments: Mapping[str, Any]) -> str:
    """Return the address on which a pod's engine listens: all, or only those of IPv4 if ``--host`` is 0.0.0.0.

    Raises:
        Refused: ``--host`` is another address, which probes and other pods might not reach.
    """
    host = arguments.get("host", EVERY_ADDRESS)
    if host not in (EVERY_ADDRESS, _EVERY_IPV4):
        raise refused(
            f"--host {host} may be unreachable from outside the pod",
            f"use {EVERY_ADDRESS} or {_EVERY_IPV4}, or remove it",
        )
    return str(host)


def contradicts(flag: str, field: str, field_value: Any) -> Refused:
    """Return the error of a `flag` that contradicts `field`, whose value is `field_value`."""
    value = (
        " ".join(field_value)
        if isinstance(field_value, tuple)
        else str(field_value).lower()
        if isinstance(field_value, bool)
        else field_value
    )
    return refused(f"{flag} contradicts {field}, which is {value}", f"set {field}")
