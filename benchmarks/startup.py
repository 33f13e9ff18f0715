"""Measure the parts of a start, from nothing to the first served request.

Without ``--gateway`` it repeatedly starts `stoker serve` on this machine and reads the parts from the server's log line
``ready after``. The page cache is dropped before each start if this process may do so (root). Python's bytecode is
compiled beforehand, as in images.

    python benchmarks/startup.py --starts 10

With ``--gateway`` it sends requests through the gateway to an endpoint with ``spec.scaling`` that has no pod, and
combines the times of the client, the cluster and the engine's log. All clocks must agree, for example in a kind cluster
on this machine.

    python benchmarks/startup.py --gateway http://127.0.0.1:8080 --key KEY --endpoint NAMESPACE/NAME --starts 10

The first two columns of the table are single starts, whose parts add up: the median start by total time, and the worst.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final

import httpx
from machine import cpu_name

#: Longest time of a start, and of the end of a pod, in seconds.
_TIMEOUT_S: Final = 600.0
_READY: Final = re.compile(r"ready after [\d.]+ s: (.*)")
_DROP_CACHES: Final = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True)
class Start:
    """One start.

    Attributes:
        parts: seconds of each part, in order.
        cpu_s: CPU time of all its processes in seconds, if known.
    """

    parts: Mapping[str, float]
    cpu_s: float | None = None

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def engine_parts(log: str) -> dict[str, float]:
    """Return the parts of an engine's start from its log.

    Raises:
        ValueError: the log has no such line.
    """
    found = _READY.search(log)
    if found is None:
        raise ValueError(f"the engine's log has no line 'ready after':\n{log[-2000:]}")
    return {name: float(value) for name, value in (part.rsplit(" ", 1) for part in found[1].split(", "))}


def drop_page_cache() -> bool:
    """Drop the system's page cache; return whether that was permitted."""
    try:
        os.sync()
        _DROP_CACHES.write_text("3")
    except OSError:
        return False
    return True


# ---- on this machine


def start_here(command: Sequence[str], port: int, environment: Mapping[str, str]) -> Start:
    """Start a server, wait until ``/ready`` returns 200, and stop it."""
    before = _children_cpu_s()
    with running(command, port, environment) as server:
        parts = server.parts()
    return Start(parts, _children_cpu_s() - before)


@dataclass(frozen=True)
class Running:
    """A server that is ready.

    Attributes:
        ready_s: seconds from its start until ``/ready`` returned 200.
    """

    process: subprocess.Popen[bytes]
    ready_s: float
    _log: IO[str]

    def log(self) -> str:
        """Return what it has logged."""
        self._log.seek(0)
        return self._log.read()

    def parts(self) -> dict[str, float]:
        """Return the parts of its start, in seconds."""
        parts = engine_parts(self.log())
        return {**parts, "answer of /ready": self.ready_s - sum(parts.values())}


@contextmanager
def running(command: Sequence[str], port: int, environment: Mapping[str, str] | None = None) -> Iterator[Running]:
    """Run a server during the block, which begins when ``/ready`` returns 200.

    Raises:
        RuntimeError: the server ends, or is not ready in time; with its log.
    """
    began = time.monotonic()
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        ) as server,
    ):
        try:
            while not _is_ready(port):
                if server.poll() is not None or time.monotonic() > began + _TIMEOUT_S:
                    log.seek(0)
                    raise RuntimeError(f"the server does not start:\n{log.read()}")
                time.sleep(0.01)
            yield Running(server, time.monotonic() - began, log)
        finally:
            server.send_signal(signal.SIGINT)  # stops at once, without the drain period
            server.wait()


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def starts_here(options: argparse.Namespace) -> tuple[list[Start], str]:
    """Return the starts, and a description of their conditions."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "stoker",
        "serve",
        options.model,
        "--port",
        str(options.port),
        *options.flags,
    ]
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
        start_here(command, options.port, environment)  # compiles bytecode and kernels, and assembles the model
        starts, is_cold = [], True
        for _ in range(options.starts):
            is_cold = not options.warm and drop_page_cache()
            starts.append(start_here(command, options.port, environment))
            print(f"{starts[-1].total:6.2f} s  {dict(starts[-1].parts)}", file=sys.stderr, flush=True)
    return starts, f"`stoker serve {options.model}`, page cache {'cold' if is_cold else 'warm'}"


# ---- in a cluster, from zero


@dataclass
class Watch:
    """Times at which a cluster's objects were first seen in a state.

    Attributes:
        first_seen: maps (object name, state) to seconds since 1970.
    """

    namespace: str
    name: str
    first_seen: dict[tuple[str, str], float] = field(default_factory=dict)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch during the block."""
        processes = [self._start(kind) for kind in ("deployments", "pods")]
        try:
            yield
        finally:
            for process in processes:
                process.terminate()
                process.wait()

    def _start(self, kind: str) -> subprocess.Popen[str]:
        command = ["kubectl", "get", kind, "--namespace", self.namespace, "--watch", "--output=json"]
        selector = f"--selector=app.kubernetes.io/instance={self.name}"
        process = subprocess.Popen([*command, selector], stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        text = ""
        for line in process.stdout:
            text += line
            if line.rstrip("\n") == "}":  # end of an object
                self._see(json.loads(text))
                text = ""

    def _see(self, document: Mapping[str, Any]) -> None:
        now, name = time.time(), str(document["metadata"]["name"])
        status = document.get("status", {})
        if document["kind"] == "Deployment":
            states = {"scaled": document["spec"].get("replicas", 1) > 0}
        else:
            containers = status.get("containerStatuses", [])
            states = {
                "created": True,
                "scheduled": bool(document["spec"].get("nodeName")),
                "started": any("running" in each.get("state", {}) for each in containers),
            }
        for state, holds in states.items():
            if holds:
                self.first_seen.setdefault((name, state), now)


def start_from_zero(options: argparse.Namespace, key: str) -> Start:
    """Send a request to an endpoint without pods, and wait for the whole response."""
    namespace, name = options.endpoint.split("/")
    wait_for_zero(namespace, name)
    if not options.warm:
        drop_page_cache()
    watch = Watch(namespace, name)
    with watch.running():
        time.sleep(2)  # until the watches have started
        watch.first_seen.clear()
        sent = time.time()
        answer = httpx.post(
            f"{options.gateway}/v1/completions",
            json={"model": options.served, "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0},
            headers={"Authorization": f"Bearer {key}"},
            timeout=_TIMEOUT_S,
        )
        answered = time.time()
        answer.raise_for_status()
    held_s = float(answer.headers["x-stoker-held-seconds"])
    pod = next(found for found, state in watch.first_seen if state == "started")
    log = _kubectl("logs", pod, "--namespace", namespace, "--all-containers")
    line = next(each for each in log.splitlines() if _READY.search(each))
    stamp = re.search(r"\d{4}-\d\d-\d\dT[\d:.]+Z", line)
    assert stamp is not None, line
    ready = datetime.fromisoformat(stamp[0].replace("Z", "+00:00")).timestamp()
    engine = engine_parts(line)
    scaled = min(at for (_, state), at in watch.first_seen.items() if state == "scaled")
    created, scheduled = watch.first_seen[pod, "created"], watch.first_seen[pod, "scheduled"]
    return Start(
        {
            "held → count written": scaled - sent,
            "→ pod created": created - scaled,
            "→ scheduled": scheduled - created,
            "→ engine's process started": ready - sum(engine.values()) - scheduled,
            **{f"engine: {part}": seconds for part, seconds in engine.items()},
            "ready → dispatched": sent + held_s - ready,
            "first answer": answered - sent - held_s,
        }
    )


def wait_for_zero(namespace: str, name: str) -> None:
    """Wait until an endpoint has no pods and is scaled to zero."""
    deadline = time.monotonic() + _TIMEOUT_S
    selector = f"--selector=app.kubernetes.io/instance={name}"
    while time.monotonic() < deadline:
        phase = _kubectl("get", "inferenceendpoint", name, "-n", namespace, "-o", "jsonpath={.status.scaling.phase}")
        if phase == "Zero" and not _kubectl("get", "pods", "-n", namespace, selector, "-o", "name").strip():
            return
        time.sleep(1)
    raise TimeoutError(f"{namespace}/{name} is not scaled to zero; does it have spec.scaling with minReplicas 0?")


def _kubectl(*arguments: str) -> str:
    return subprocess.run(["kubectl", *arguments], capture_output=True, text=True, check=True).stdout


# ---- the table


def table(starts: Sequence[Start]) -> str:
    """Return a Markdown table: the median and the worst start, and median and maximum of each part."""
    by_total = sorted(starts, key=lambda start: start.total)
    median, worst = by_total[(len(by_total) - 1) // 2], by_total[-1]
    names = list(dict.fromkeys(name for start in starts for name in start.parts))
    rows = [
        "| part | median start, s | worst start, s | median of the part, s | most of the part, s |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in names:
        values = [start.parts.get(name, 0.0) for start in starts]
        rows.append(_row(name, median.parts.get(name, 0.0), worst.parts.get(name, 0.0), values))
    rows.append(_row("**whole**", median.total, worst.total, [start.total for start in starts]))
    if all(start.cpu_s is not None for start in starts):
        times = [start.cpu_s or 0.0 for start in starts]
        rows.append(_row("processor time", median.cpu_s or 0.0, worst.cpu_s or 0.0, times))
    return "\n".join(rows)


def _row(name: str, median: float, worst: float, values: Sequence[float]) -> str:
    return f"| {name} | {median:.2f} | {worst:.2f} | {statistics.median(values):.2f} | {max(values):.2f} |"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--warm", action="store_true", help="leave the page cache as it is")
    parser.add_argument("--model", default="demo://gemma-3-270m")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--gateway", help="URL of a gateway: measure starts from zero in a cluster")
    parser.add_argument("--key", default="", help="a key of the gateway's clients")
    parser.add_argument("--endpoint", help="NAMESPACE/NAME of an endpoint with spec.scaling and minReplicas 0")
    parser.add_argument("--served", default="gemma-3-270m", help="name by which requests ask for it")
    parser.add_argument("flags", nargs="*", help="further flags of `stoker serve`, after --")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    if options.gateway:
        starts = []
        for _ in range(options.starts):
            starts.append(start_from_zero(options, options.key))
            print(f"{starts[-1].total:6.2f} s  {dict(starts[-1].parts)}", file=sys.stderr, flush=True)
        conditions = f"{options.endpoint} from zero, page cache {'as it is' if options.warm else 'cold'}"
    else:
        starts, conditions = starts_here(options)
    print(
        f"{len(starts)} starts of {conditions}; {cpu_name()}, {os.cpu_count()} CPUs, load average before {load:.1f}\n"
    )
    print(table(starts))


if __name__ == "__main__":
    main()
