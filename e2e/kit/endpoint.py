"""An InferenceEndpoint in the cluster, as its user sees it."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kit.cluster import Cluster, Object
from kit.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]

#: Time for a pod to start, in seconds. The demo model loads in seconds on an idle CPU; three pods on two CPUs take
#: longer.
START = 300


def example(file: str) -> Object:
    """Return a manifest of examples/."""
    document: Object = yaml.safe_load((ROOT / "examples" / file).read_text())
    return document


def demo(name: str = "demo", **changes: Any) -> Object:
    """Return examples/01-demo.yaml with changed parts of its spec: ``demo(replicas=2, engine={"maxNumSeqs": 4})``.

    By default it computes in float32, since its tokens are compared with transformers' in float32. It requests less CPU
    than the example, so that several pods fit on one small node.
    """
    document = example("01-demo.yaml")
    document["metadata"]["name"] = name
    document["spec"]["hardware"]["resources"]["requests"]["cpu"] = "100m"
    document["spec"] = merged({**document["spec"], "engine": {"dtype": "float32"}}, changes)
    return document


def merged(spec: Object, changes: Object) -> Object:
    """Return `spec` with `changes` applied as a JSON merge patch: None removes a field."""
    result = copy.deepcopy(spec)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = merged(result.get(key, {}), value)
        else:
            result[key] = value
    return result


# The engine is a child process of the server.
_SIGNAL = """
import os, pathlib, signal
for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
    pid, parent = int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
    words = (stat.parent / "cmdline").read_bytes()
    if parent == 1 and b"processes.main" in words and pid != os.getpid():
        print(pid, words)
        os.kill(pid, signal.{signal})
"""


@dataclass(frozen=True)
class Endpoint:
    """An endpoint, which need not exist."""

    cluster: Cluster
    namespace: str
    name: str = "demo"

    def apply(self, document: Object) -> None:
        """Create or change the endpoint."""
        assert document["metadata"]["name"] == self.name
        self.cluster.apply(self.namespace, document)

    def patch(self, **spec: Any) -> None:
        """Change fields of its spec; None removes one."""
        patch = json.dumps({"spec": spec})
        self._kubectl("patch", "inferenceendpoint", self.name, "--type=merge", "-p", patch)

    def delete(self) -> None:
        """Delete the endpoint, and wait for its deletion, but not for that of its objects."""
        self._kubectl("delete", "inferenceendpoint", self.name, "--ignore-not-found")

    def get(self) -> Object:
        """Return the object."""
        found: Object = self.cluster.get("inferenceendpoint", self.name, "--namespace", self.namespace)
        return found

    def condition(self, kind: str = "Ready") -> Object:
        """Return a condition; empty if it is missing or describes an older spec."""
        return _condition(self.get(), kind)

    def ready(self) -> Object | None:
        """Return its status if it is Ready with the newest spec, otherwise None."""
        endpoint = self.get()
        return endpoint["status"] if _condition(endpoint, "Ready").get("status") == "True" else None

    def wait_ready(self, timeout: float = START) -> Object:
        """Wait until the endpoint is ready, and return its status."""
        return wait_for(self.ready, f"{self.name} is ready; {self.condition()}", timeout)

    def wait_reason(self, reason: str, kind: str = "Ready", status: str = "False", timeout: float = 60) -> Object:
        """Wait until the condition `kind` has this status and reason, and return it."""

        def matching_condition() -> Object | None:
            found = self.condition(kind)
            return found if (found.get("status"), found.get("reason")) == (status, reason) else None

        return wait_for(matching_condition, f"{kind} is {status}, {reason}; {self.condition(kind)}", timeout)

    def pods(self) -> list[Object]:
        """Return its pods that are neither terminating nor ended."""
        selector = f"app.kubernetes.io/instance={self.name}"
        items = self.cluster.get("pods", "--namespace", self.namespace, "-l", selector)["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"] and _lives(pod)]

    def lives(self) -> dict[str, int]:
        """Return container restarts by pod UID. Two equal results mean that no pod was replaced or restarted."""
        return {
            pod["metadata"]["uid"]: sum(each["restartCount"] for each in pod["status"].get("containerStatuses", ()))
            for pod in self.pods()
        }

    def serving(self) -> set[str]:
        """Return the ready addresses of its Service."""
        selector = f"kubernetes.io/service-name={self.name}"
        slices = self.cluster.get("endpointslices", "--namespace", self.namespace, "-l", selector)["items"]
        return {
            address
            for each in slices
            for endpoint in each.get("endpoints") or ()
            if endpoint["conditions"].get("ready")
            for address in endpoint["addresses"]
        }

    def run(self, pod: str, code: str) -> str:
        """Run a Python program in a pod's engine container, and return its output."""
        return self._kubectl("exec", pod, "--container", "engine", "--", "python3", "-c", code)

    def signal_engine(self, pod: str, signal: str) -> None:
        """Send a signal to a pod's engine processes, but not to its server: ``signal_engine(pod, "SIGSTOP")``."""
        assert self.run(pod, _SIGNAL.format(signal=signal)).strip(), f"{pod} has no engine"

    def _kubectl(self, *arguments: str) -> str:
        return self.cluster.kubectl(arguments[0], "--namespace", self.namespace, *arguments[1:])


def _condition(endpoint: Object, kind: str) -> Object:
    for each in endpoint.get("status", {}).get("conditions", ()):
        if each["type"] == kind and each["observedGeneration"] == endpoint["metadata"]["generation"]:
            found: Object = each
            return found
    return {}


def _lives(pod: Object) -> bool:
    return pod["status"].get("phase") not in ("Failed", "Succeeded")
