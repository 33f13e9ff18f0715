"""Traffic: an application in a pod of the cluster talks to an endpoint while the test disturbs it.

with traffic(cluster, namespace, image, url) as flow:
    ...                       # what should not, or should, disturb
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
#: Requests; fewer prove nothing.
_ENOUGH = 21


@dataclass(frozen=True)
class Request:
    """A request; times are seconds since 1970 on the node's clock. `first` is when its first text came, if any did."""

    start: float
    end: float
    kind: str
    outcome: str
    error: str
    tokens: int
    first: float | None = None


@dataclass(frozen=True)
class Result:
    """What became of all requests."""

    requests: tuple[Request, ...]

    @property
    def sent(self) -> int:
        return len(self.requests)

    @property
    def failed(self) -> list[Request]:
        """Those that got no answer."""
        return [each for each in self.requests if each.outcome == "failed"]

    @property
    def cut(self) -> list[Request]:
        """Those whose answer did not come to its end."""
        return [each for each in self.requests if each.outcome == "cut"]

    @property
    def broken(self) -> list[Request]:
        """Those that failed or were cut."""
        return [*self.failed, *self.cut]

    @property
    def times_to_first_token(self) -> list[float]:
        """Of streams, in seconds, shortest first."""
        streams = [each for each in self.requests if each.kind != "whole"]
        return sorted(each.first - each.start for each in streams if each.first is not None)

    @property
    def longest_gap(self) -> float:
        """The most seconds without a request that came to its end."""
        ends = sorted(each.end for each in self.requests if each.outcome == "ok")
        first = min((each.start for each in self.requests), default=0)
        return max((after - before for before, after in zip([first, *ends], ends, strict=False)), default=0)

    def unbroken(self) -> None:
        """Every request was answered, to the end."""
        assert self.sent >= _ENOUGH, f"{self.sent} requests are too few to judge by"
        broken = self.broken
        assert not broken, f"{len(broken)} of {self.sent} requests failed or were cut, such as\n{listed(broken[:10])}"


def listed(requests: Iterable[Request]) -> str:
    """One a line: a text, which pytest does not shorten."""
    return "\n".join(map(str, requests))


@dataclass
class Flow:
    """Traffic that flows; `result` is there once it has ended."""

    cluster: Cluster
    namespace: str
    pod: str
    _ended: list[Result] = field(default_factory=list)

    @property
    def result(self) -> Result:
        return self._ended[0]

    def so_far(self) -> Result:
        """What was reported until now."""
        return _read(self.cluster.kubectl("logs", self.pod, "--namespace", self.namespace))

    def wait_for(self, more: int, timeout: float = START) -> None:
        """Waits until `more` further requests have been answered."""
        before = self.so_far().sent
        wait_for(lambda: self.so_far().sent >= before + more, f"{more} more requests", timeout)

    def end(self) -> None:
        """Lets requests in flight finish, and reads what was reported."""
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
    """Traffic from a pod to `url`. It flows when the block begins; it has ended, and `result` is there, afterwards.

    Args:
        program: the client, if not `traffic_client.py`; it reports each request as that one does.
        arguments: more of them, after those that both have.
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
        wait_for(lambda: flow.so_far().sent >= _ENOUGH, "enough requests to judge by", START)
        flow.end()
    finally:
        cluster.kubectl("delete", "pod", name, "--namespace", namespace, "--grace-period=1", "--wait=false")


def client_pod(name: str, image: str, command: list[str]) -> Object:
    """A pod of the application, which a namespace with restricted PodSecurity takes. It prefers the control plane, so
    that draining a worker does not drain it."""
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
