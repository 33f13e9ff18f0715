"""Resource usage of the processes in pods, sampled every few seconds.

A probe runs in each container and reports all of its processes (``/proc``) and the program's metrics (``/metrics``). A
process is identified by pod, pid and start time: its successor in the same container counts as another process.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from kit.cluster import Cluster, Object

EVERY_S = 10

#: Arguments: port of /metrics, and API key for /load (empty: there is no /load).
_PROBE = """
import http.client, json, os, sys

def ask(path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=5)
    try:
        connection.request("GET", path, headers={"Connection": "close", **headers})
        return connection.getresponse().read().decode()
    except OSError:
        return ""
    finally:
        connection.close()

processes = []
for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
    try:
        stat = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
        line = open(f"/proc/{pid}/cmdline").read()
        role = "tracker" if "resource_tracker" in line else "tokenizer" if "tokenizer_worker" in line else "child"
        fds = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        continue
    if pid != os.getpid() and int(stat[21]):
        processes.append({
            "pid": pid, "started": int(stat[19]), "rss": int(stat[21]) * os.sysconf("SC_PAGE_SIZE"), "fds": fds,
            "threads": int(stat[17]), "role": "main" if pid == 1 else role,
        })
metrics = {}
for line in ask("/metrics").splitlines():
    if not line.startswith("#"):
        name = line.partition("{")[0].partition(" ")[0]
        metrics[name] = metrics.get(name, 0) + float(line.rpartition(" ")[2])
if metrics and sys.argv[2:]:
    load = ask("/load", Authorization=f"Bearer {sys.argv[2]}")
    metrics["load"] = json.loads(load)["server_load"] if load else -1
print(json.dumps({"processes": processes, "metrics": {name: metrics[name] for name in metrics if name in NAMES}}))
"""
_HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "load")
_METRICS = (*_HELD, "stoker_operator_leader")


@dataclass(frozen=True)
class Sample:
    """One sample of a process; memory in bytes, times in seconds since 1970."""

    when: float
    rss: int
    fds: int
    threads: int
    at_rest: bool


@dataclass
class Life:
    """A process with all of its samples.

    Attributes:
        owner: endpoint or release that the pod belongs to.
        role: "server", "engine", "operator" …
        samples: never empty.
    """

    owner: str
    pod: str
    role: str
    samples: list[Sample] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.samples[-1].when - self.samples[0].when

    @property
    def at_rest(self) -> list[Sample]:
        """Return the samples taken at idle moments."""
        return [sample for sample in self.samples if sample.at_rest]


@dataclass(frozen=True)
class Watched:
    """One container of each pod that matches a selector, to be sampled.

    Attributes:
        roles: role of the container's first process, and of its children.
    """

    namespace: str
    selector: str
    container: str
    port: int
    roles: tuple[str, str]
    api_key: str = ""


class Watch:
    """Samples `watched` every few seconds in a thread, as a context manager.

    A pod that cannot be read, because it terminates or the API server is down, is skipped until the next time.
    """

    def __init__(self, cluster: Cluster, *watched: Watched) -> None:
        self.lives: dict[tuple[str, int, int], Life] = {}
        self._cluster, self._watched = cluster, watched
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def look(self, at_rest: bool = False) -> dict[str, dict[str, float]]:
        """Sample all processes; return the programs' metrics by pod."""
        with self._looking:
            return dict(self._look(at_rest))

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self.look()

    def _look(self, at_rest: bool) -> Iterator[tuple[str, dict[str, float]]]:
        for watched in self._watched:
            for pod, owner in self._pods(watched):
                arguments = [str(watched.port), *([watched.api_key] if watched.api_key else [])]
                program = _PROBE.replace("NAMES", repr(_METRICS))
                probe = ("python3", "-I", "-S", "-c", program, *arguments)
                options = ("--namespace", watched.namespace, "--request-timeout=20s")
                output = self._cluster.kubectl(
                    "exec", pod, *options, "--container", watched.container, "--", *probe, check=False
                )
                if seen := _parsed(output):
                    self._take(watched, owner, pod, seen["processes"], at_rest)
                    yield pod, seen["metrics"]

    def _pods(self, watched: Watched) -> list[tuple[str, str]]:
        """Return the names and owners of running pods."""
        which = ("--namespace", watched.namespace, "-l", watched.selector, "--request-timeout=10s")
        running = ("--field-selector", "status.phase=Running")
        listed = self._cluster.kubectl("get", "pods", *which, *running, "-o", "json", check=False)
        found = [pod["metadata"] for pod in (_parsed(listed) or {}).get("items", ())]
        return [(pod["name"], pod["labels"]["app.kubernetes.io/instance"]) for pod in found]

    def _take(self, watched: Watched, owner: str, pod: str, processes: list[Object], at_rest: bool) -> None:
        when = time.time()
        main, child = watched.roles
        for each in processes:
            role = {"main": main, "child": child}.get(each["role"]) or str(each["role"])
            life = self.lives.setdefault((pod, each["pid"], each["started"]), Life(owner, pod, role))
            life.samples.append(Sample(when, each["rss"], each["fds"], each["threads"], at_rest))


def _parsed(text: str) -> Object | None:
    """Return the JSON object, or None for other text."""
    try:
        found: Object = json.loads(text)
    except ValueError:
        return None
    return found


def at_rest(metrics: dict[str, float]) -> bool:
    """Return whether an engine has no requests and holds no resources for any."""
    return all(metrics.get(name) == 0 for name in _HELD)
