"""Traffic: an application in a pod of the cluster sends requests to an endpoint while the test disturbs it.

with traffic(cluster, namespace, image, url) as flow:
    ...                       # disturb the endpoint
flow.result.unbroken()
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kit.cluster import Cluster, Object
from kit.endpoint import START
from kit.waiting import wait_for

_CLIENT = Path(__file__).with_name("traffic_client.py")
#: Smallest number of requests that is conclusive.
_ENOUGH = 21


@dataclass(frozen=True)
class Request:
    """A request.

    Attributes:
        start, first, end: seconds since 1970 by the node's clock; `first` is when its first text arrived, or None.
    """

    start: float
    end: float
    kind: str
    outcome: str
    error: str
    tokens: int
    first: float | None = None


@dataclass(frozen=True)
class Result:
    """The results of all requests."""

    requests: tuple[Request, ...]

    @property
    def sent(self) -> int:
        return len(self.requests)

    @property
    def failed(self) -> list[Request]:
        """Return requests that failed before any text arrived."""
        return [each for each in self.requests if each.outcome == "failed"]

    @property
    def cut(self) -> list[Request]:
        """Return requests that failed after some text had arrived."""
        return [each for each in self.requests if each.outcome == "cut"]

    @property
    def broken(self) -> list[Request]:
        """Return requests that failed or were cut."""
        return [*self.failed, *self.cut]

    @property
    def times_to_first_token(self) -> list[float]:
        """Return the streams' times to first token in seconds, sorted."""
        streams = [each for each in self.requests if each.kind != "whole"]
        return sorted(each.first - each.start for each in streams if each.first is not None)

    @property
    def longest_gap(self) -> float:
        """Return the longest time without a completed request, in seconds."""
        ends = sorted(each.end for each in self.requests if each.outcome == "ok")
        first = min((each.start for each in self.requests), default=0)
        return max((after - before for before, after in zip([first, *ends], ends, strict=False)), default=0)

    def unbroken(self) -> None:
        """Assert that there were enough requests, all answered completely."""
        assert self.sent >= _ENOUGH, f"{self.sent} requests are too few for a verdict"
        broken = self.broken
        assert not broken, f"{len(broken)} of {self.sent} requests failed or were cut, such as\n{listed(broken[:10])}"


def listed(requests: Iterable[Request]) -> str:
    """List requests as text, one per line, because pytest would shorten a list."""
    return "\n".join(map(str, requests))


@dataclass
class Flow:
    """Running traffic; `result` is available once it has ended."""

    cluster: Cluster
    namespace: str
    pod: str
    _ended: list[Result] = field(default_factory=list)

    @property
    def result(self) -> Result:
        return self._ended[0]

    def so_far(self) -> Result:
        """Return the results reported so far."""
        return _read(self.cluster.kubectl("logs", self.pod, "--namespace", self.namespace))

    def wait_for(self, more: int, timeout: float = START) -> None:
        """Wait until `more` further requests have ended."""
        before = self.so_far().sent
        wait_for(lambda: self.so_far().sent >= before + more, f"{more} more requests", timeout)

    def end(self) -> None:
        """Let requests in flight finish, and read the results."""
        namespace_flag = ("--namespace", self.namespace)
        self.cluster.kubectl("exec", self.pod, *namespace_flag, "--", "sh", "-c", "kill -TERM 1")

        def ended() -> bool:
            phase: str = self.cluster.get("pod", self.pod, *namespace_flag)["status"]["phase"]
            return phase in ("Succeeded", "Failed")

        wait_for(ended, "the requests in flight have ended", 180)
        log = self.cluster.kubectl("logs", self.pod, *namespace_flag)
        assert log.splitlines()[-1].startswith('{"ended"'), log[-2000:]
        self._ended.append(_read(log))


@contextlib.contextmanager
def traffic(
    cluster: Cluster,
    namespace: str,
    image: str,
    url: str,
    workers: int = 2,
    api_key: str = "none",
    program: Path = _CLIENT,
    arguments: Sequence[str] = (),
) -> Iterator[Flow]:
    """Run traffic from a pod to `url` during the block; `result` is available afterwards.

    Args:
        program: client program; another one than `traffic_client.py` must report requests in the same format.
        arguments: additional arguments, after those common to all programs.
    """
    name = f"traffic-{uuid.uuid4().hex[:6]}"
    command = ["python", "-c", program.read_text(), url, str(workers), api_key, *arguments]
    cluster.apply(namespace, client_pod(name, image, command))
    flow = Flow(cluster, namespace, name)
    try:
        phase = ("pod", name, "--namespace", namespace)
        wait_for(lambda: cluster.get(*phase)["status"]["phase"] != "Pending", "the client has started", START)
        wait_for(lambda: flow.so_far().sent >= 5, "the client is answered", START)
        yield flow
        wait_for(lambda: flow.so_far().sent >= _ENOUGH, "enough requests for a verdict", START)
        flow.end()
    finally:
        cluster.kubectl("delete", "pod", name, "--namespace", namespace, "--grace-period=1", "--wait=false")


def client_pod(name: str, image: str, command: list[str]) -> Object:
    """Return a pod of the application that restricted PodSecurity accepts.

    It prefers the control plane, so that draining a worker does not evict it.
    """
    control_plane = "node-role.kubernetes.io/control-plane"
    prefers = {
        "weight": 1,
        "preference": {"matchExpressions": [{"key": control_plane, "operator": "Exists"}]},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "application"}},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "tolerations": [{"key": control_plane, "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [prefers]}},
            "containers": [
                {
                    "name": "application",
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": command,
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
        },
    }


def _read(log: str) -> Result:
    records = [json.loads(line) for line in log.strip("\n").split("\n") if line.startswith('{"start"')]
    return Result(tuple(Request(**each) for each in records))
