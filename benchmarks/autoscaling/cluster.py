"""Simulated pods that start, serve and end in virtual time, behind the gateway's real picker."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from autoscaling.loads import Load
from stoker_gateway.scheduling.load import ServerLoad
from stoker_gateway.scheduling.picker import EndpointPicker, Refusal
from stoker_gateway.scheduling.routing_request import RoutingRequest

#: Requests that a pod computes concurrently; other requests that the picker sends it wait in the pod.
SLOTS: Final = 8
#: Interval of polling the pods and of asking the autoscaler, in seconds.
TICK_SECONDS: Final = 0.5
#: Mean computing time of a request in seconds; the distribution is lognormal.
MEAN_SECONDS: Final = 5.0
SIGMA: Final = 0.6


@dataclass
class Pod:
    """Pod; `number` orders pods by age."""

    number: int
    created: float
    ready: bool = False
    leaves: bool = False
    running: int = 0
    queue: deque[Request] = field(default_factory=deque)

    @property
    def name(self) -> str:
        """Return its address."""
        return f"pod-{self.number}:8000"


@dataclass
class Request:
    """Request with its arrival time and its computing time, in seconds."""

    arrived: float
    seconds: float
    pick: int = 0


@dataclass(frozen=True)
class Pending:
    """Current counts of requests (held and queued in the gateway, in flight), and of pods.

    Attributes:
        running: by pod address: requests that are computed, and that wait in the pod.
    """

    held: int
    queued: int
    in_flight: int
    running: dict[str, tuple[int, int]]
    replicas: int
    ready: int

    @property
    def total(self) -> int:
        """Return the number of requests that have not ended."""
        return self.held + self.queued + self.in_flight


Decide = Callable[[Pending, float], int]


@dataclass(frozen=True)
class Outcome:
    """Result of a load.

    Attributes:
        waits: seconds from each request's arrival until a pod computes it, sorted.
        counts: desired number of pods, per tick.
    """

    waits: list[float]
    pod_seconds: float
    highest: int
    counts: list[int]


class Simulation:
    """One run of a load with one autoscaler."""

    def __init__(self, load: Load, decide: Decide, replicas: int, seed: int) -> None:
        self.load, self.decide, self.seed = load, decide, seed
        self.random = random.Random(f"pods {seed}")
        self.picker = EndpointPicker()
        self.pods: dict[int, Pod] = {}
        self.by_name: dict[str, Pod] = {}
        self.waiting: deque[Request] = deque()
        self.waits: list[float] = []
        self.pod_seconds = 0.0
        self.numbers = count()
        self.order = count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.now = 0.0
        self.in_flight = 0
        self.counts: list[int] = []
        for _ in range(replicas):
            self.add_pod(0.0)

    def run(self) -> Outcome:
        """Run until the load and all of its requests have ended."""
        seconds = random.Random(f"seconds {self.load.name} {self.seed}")
        mu = -(SIGMA**2) / 2
        arrivals = self.load.arrivals(self.seed)

        def arrive() -> None:
            self.waiting.append(Request(self.now, MEAN_SECONDS * seconds.lognormvariate(mu, SIGMA)))
            self.dispatch()
            if (following := next(arrivals, None)) is not None:
                self.at(following, arrive)

        self.at(next(arrivals), arrive)
        self.at(0.0, self.tick)
        while self.events:
            self.now, _, action = heapq.heappop(self.events)
            action()
        for pod in self.pods.values():
            self.pod_seconds += self.now - pod.created
        return Outcome(sorted(self.waits), self.pod_seconds, max(self.counts), self.counts)

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Schedule an action."""
        heapq.heappush(self.events, (time, next(self.order), action))

    def add_pod(self, start_seconds: float | None = None) -> None:
        """Create a pod. By default its start takes the load's start-up time, with a lognormal deviation."""
        if start_seconds is None:
            start_seconds = self.load.start_seconds * self.random.lognormvariate(0, 0.2)
        pod = Pod(next(self.numbers), self.now)
        self.pods[pod.number] = pod

        def become_ready() -> None:
            if pod.number in self.pods and not pod.leaves:
                pod.ready = True

        self.at(self.now + start_seconds, become_ready)

    def remove_pod(self) -> None:
        """Remove a pod as a ReplicaSet does: the newest that is not ready, else the newest. Its requests end first."""
        staying = [pod for pod in self.pods.values() if not pod.leaves]
        pod = max(staying, key=lambda pod: (not pod.ready, pod.number))
        pod.leaves = True
        self.end_if_empty(pod)

    def end_if_empty(self, pod: Pod) -> None:
        """Delete a leaving pod once it has no requests."""
        if pod.leaves and not pod.running and not pod.queue:
            del self.pods[pod.number]
            self.pod_seconds += self.now - pod.created

    def dispatch(self) -> None:
        """Send waiting requests, in order, until the picker refuses."""
        while self.waiting:
            pick = self.picker.pick(RoutingRequest(size=2000), self.now)
            if isinstance(pick, Refusal):
                return
            request = self.waiting.popleft()
            request.pick = pick.number
            self.in_flight += 1
            pod = self.by_name[pick.servers[0]]
            pod.queue.append(request)
            self.compute(pod)

    def compute(self, pod: Pod) -> None:
        """Fill a pod's slots."""
        while pod.queue and pod.running < SLOTS:
            request = pod.queue.popleft()
            pod.running += 1
            self.waits.append(self.now - request.arrived)
            self.at(self.now + request.seconds, lambda request=request: self.end(pod, request))  # type: ignore[misc]

    def end(self, pod: Pod, request: Request) -> None:
        """End a request."""
        pod.running -= 1
        self.in_flight -= 1
        self.picker.ended(request.pick, (pod.name,), self.now)
        self.compute(pod)
        self.end_if_empty(pod)
        self.dispatch()

    def discover(self) -> None:
        """Update the gateway's list of serving pods."""
        by_name = {pod.name: pod for pod in self.pods.values() if pod.ready and not pod.leaves}
        if by_name.keys() != self.by_name.keys():
            self.by_name = by_name
            self.picker.set_servers(by_name, self.now)

    def tick(self) -> None:
        """Poll the pods, ask the autoscaler, and change the number of pods."""
        self.discover()
        for name, pod in self.by_name.items():
            self.picker.observe(name, ServerLoad(pod.running, len(pod.queue), pod.running / SLOTS), self.now, self.now)
        self.dispatch()
        staying = sum(not pod.leaves for pod in self.pods.values())
        held, queued = (0, len(self.waiting)) if self.by_name else (len(self.waiting), 0)
        running = {name: (pod.running, len(pod.queue)) for name, pod in self.by_name.items()}
        pending = Pending(held, queued, self.in_flight, running, staying, len(self.by_name))
        wish = self.decide(pending, self.now)
        self.counts.append(wish)
        for _ in range(wish - staying):
            self.add_pod()
        for _ in range(staying - wish):
            self.remove_pod()
        self.discover()
        if self.now < self.load.seconds or self.in_flight or self.waiting:
            self.at(self.now + TICK_SECONDS, self.tick)
