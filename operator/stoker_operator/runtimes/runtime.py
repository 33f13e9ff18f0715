"""What the operator needs of an engine to run it: the seam behind which each has one file.

An endpoint's typed fields mean the same under every runtime, so a runtime's first task is to express them in its
own flags. ``spec.engine.args`` is for what has no field: an argument may repeat a field's value, and never contradict
it, since a plan that counts with the field would be wrong.
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

#: Port an engine listens on in a pod.
PORT: Final = 8000
_EVERY_IPV4: Final = "0.0.0.0"
#: Seconds after the end of a pod has started in which requests still reach it: every node and proxy must learn first.
SHUTDOWN_GRACE: Final = 5.0


@dataclass(frozen=True)
class Invocation:
    """How an engine is started.

    Attributes:
        words: after the program's name.
        grace: seconds in which requests that still arrive after the end has started are served.
    """

    words: tuple[str, ...]
    grace: float = SHUTDOWN_GRACE


@dataclass(frozen=True)
class Probe:
    """A path that answers 200 while all is well.

    Attributes:
        path: of the HTTP request.
        period: seconds between two.
        failures: so many in a row count.
    """

    path: str
    period: int
    failures: int


@dataclass(frozen=True)
class Probes:
    """The kubelet's probes: whether the engine has started, whether it must be restarted, whether it can serve."""

    startup: Probe
    liveness: Probe
    readiness: Probe


class Runtime(ABC):
    """One engine.

    Attributes:
        name: what ``spec.engine.runtime`` calls it.
        command: its program in an image; empty where the image's entry point is it.
        metrics_path: where Prometheus' metrics are.
        drains: it ends orderly by itself: on SIGTERM it serves on, and then finishes the requests it has. For one
            that does not, the pod waits instead.
        key_variable: environment variable with an API key.
        reads_key_files: it takes all API keys of a folder, so that a mounted Secret may change while it runs.
        needs_shm: its processes meet in shared memory even where the model is not split.
        user: the user that its images can run as where they name none but root.
        env: more variables that its images need.
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
        """How the engine is started.

        Args:
            spec: the endpoint's, as its author wrote it.
            plan: what was decided about it.
            chat_template: the template's text, or the file it will be found in.
            api_keys: folder with the API keys; None where there are none, or they come otherwise.
            host: the address where the engine listens; None: at all of IPv6 and IPv4, or at all of one as
                ``spec.engine.args`` say.
            port: where it listens.

        Raises:
            Refused: ``spec.engine.args`` has an argument that the engine does not have or that contradicts a field, or
                a field requires what the engine does not have.
        """

    @abstractmethod
    def arguments(self, spec: Spec) -> Mapping[str, Any]:
        """What ``spec.engine.args`` gives, by argument.

        Raises:
            Refused: it has an argument that the engine does not have, or that is not the user's to set.
        """

    @abstractmethod
    def probes(self, spec: Spec) -> Probes:
        """The kubelet's probes."""

    def speaks_tls(self, spec: Spec) -> bool:
        """Whether the engine will serve HTTPS; False where that is not known since the arguments are refused."""
        try:
            return "ssl_certfile" in self.arguments(spec)
        except Refused:
            return False


def refused(message: str, remedy: str = "", *, field: str = "spec.engine.args") -> Refused:
    """`field` cannot be honoured."""
    return Refused(Violation(field, message, remedy))


def refuse_unreachable(arguments: Mapping[str, Any], remedies: Mapping[str, str]) -> None:
    """Refuses arguments under which the engine would not answer where the cluster sends requests.

    Args:
        arguments: arguments of ``spec.engine.args``.
        remedies: arguments that are not the user's to give, and what to do instead.

    Raises:
        Refused: there is one.
    """
    for name in arguments:
        if name in remedies:
            raise refused(f"{flag_name(name)} is not the endpoint's to choose", remedies[name])
    if str(arguments.get("ssl_cert_reqs")) == "2":
        raise refused("--ssl-cert-reqs=2 shuts out the kubelet's probes, which have no certificate", "use 1")


def listening_address(arguments: Mapping[str, Any]) -> str:
    """The address where the engine of a pod listens: all, unless ``--host`` among the arguments says which family.

    Raises:
        Refused: it is the address of one interface, by which neither probes nor other pods might reach the engine.
    """
    host = arguments.get("host", EVERY_ADDRESS)
    if host not in (EVERY_ADDRESS, _EVERY_IPV4):
        raise refused(
            f"--host {host} is not where a pod is reached", f"use {EVERY_ADDRESS} or {_EVERY_IPV4}, or remove it"
        )
    return str(host)


def contradicts(flag: str, field: str, field_value: Any) -> Refused:
    """`flag` says something else than `field`, which says `field_value`."""
    value = (
        " ".join(field_value)
        if isinstance(field_value, tuple)
        else str(field_value).lower()
        if isinstance(field_value, bool)
        else field_value
    )
    return refused(f"{flag} contradicts {field}, which is {value}", f"set {field}")
