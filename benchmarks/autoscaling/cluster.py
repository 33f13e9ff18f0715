"""Pods that start, serve and end in virtual time, behind the gateway's real picker."""

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

#: Requests that a pod computes at the same time; the next ones wait in it, as long as the picker sends them.
SLOTS: Final = 8
#: Seconds between two questions to the pods, and to the autoscaler.
TICK_SECONDS: Final = 0.5
#: A request takes so long once it is computed, in seconds: a lognormal law.
MEAN_SECONDS: Final = 5.0
SIGMA: Final = 0.6


@dataclass
class Pod:
    """A pod. `number` orders pods by age."""

    number: int
    created: float
    ready: bool = False
    leaves: bool = False
    running: int = 0
    queue: deque[Request] = field(default_factory=deque)

    @property
    def name(self) -> str:
        """Its address."""
        return f"pod-{self.number}:8000"


@dataclass
class Request:
    """A request: when it came, and how long it takes."""

    arrived: float
    seconds: float
    pick: int = 0


@dataclass(frozen=True)
class Pending:
    """Where requests are now."""

    held: int
    queued: int
    in_flight: int
    running: dict[str, tuple[int, int]]
    replicas: int
    ready: int

    @property
    def total(self) -> int:
        """Requests that have not ended."""
        return self.held + self.queued + self.in_flight


Decide = Callable[[Pending, float], int]


@dataclass(frozen=True)
class Outcome:
    """What became of a load. `waits` are seconds from arrival until a pod computes, sorted; `counts` are by tick."""

    waits: list[float]
    pod_seconds: float
    highest: int
    counts: list[int]


class Simulation:
    """One run of a load with one way to decide the count."""

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
        """Run until the load ends and all requests have."""
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
        """Do something later."""
        heapq.heappush(self.events, (time, next(self.order), action))

    def add_pod(self, start_seconds: float | None = None) -> None:
        """Create a pod; by default it starts as slowly as the load says, now and then much more slowly."""
        if start_seconds is None:
            start_seconds = self.load.start_seconds * self.random.lognormvariate(0, 0.2)
        pod = Pod(next(self.numbers), self.now)
        self.pods[pod.number] = pod

        def become_ready() -> None:
            if pod.number in self.pods and not pod.leaves:
                pod.ready = True

        self.at(self.now + start_seconds, become_ready)

    def remove_pod(self) -> None:
        """The ReplicaSet's rule: one that is not ready, or else the newest; its requests end first."""
        staying = [pod for pod in self.pods.values() if not pod.leaves]
        pod = max(staying, key=lambda pod: (not pod.ready, pod.number))
        pod.leaves = True
        self.end_if_empty(pod)

    def end_if_empty(self, pod: Pod) -> None:
        """A pod that leaves is gone with its last request."""
        if pod.leaves and not pod.running and not pod.queue:
            del self.pods[pod.number]
            self.pod_seconds += self.now - pod.created

    def dispatch(self) -> None:
        """Send what waits, in order, until the picker refuses."""
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
        """A request has its response."""
        pod.running -= 1
        self.in_flight -= 1
        self.picker.ended(request.pick, (pod.name,), self.now)
        self.compute(pod)
        self.end_if_empty(pod)
        self.dispatch()

    def discover(self) -> None:
        """The gateway sees which pods serve."""
        by_name = {pod.name: pod for pod in self.pods.values() if pod.ready and not pod.leaves}
        if by_name.keys() != self.by_name.keys():
            self.by_name = by_name
            self.picker.set_servers(by_name, self.now)

    def tick(self) -> None:
        """Ask the pods how they are, decide, and change the count."""
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
