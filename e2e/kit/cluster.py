"""A running cluster, accessed by kubectl and helm as users do."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

Object = dict[str, Any]

_TOOLS = Path(__file__).resolve().parents[1] / "cluster"


@dataclass(frozen=True)
class Images:
    """Names of the project's images on the cluster's nodes."""

    operator: str
    engine: str
    gateway: str
    client: str


@dataclass(frozen=True)
class Cluster:
    """A cluster.

    Attributes:
        environment: environment variables with which kubectl and helm find it.
    """

    environment: dict[str, str]

    @property
    def kubeconfig(self) -> Path:
        return Path(self.environment["KUBECONFIG"])

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl and return its output; the test fails if kubectl fails, unless `check` is false."""
        return self._run("kubectl", *arguments, stdin=stdin, check=check)

    def helm(self, *arguments: str, check: bool = True) -> str:
        """Run helm and return its output."""
        return self._run("helm", *arguments, check=check)

    def get(self, *arguments: str) -> Any:
        """Return the parsed output of `kubectl get ... -o json`."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def find(self, *arguments: str) -> Any:
        """Like `get`, but return None if there is no such object."""
        text = self.kubectl("get", *arguments, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def apply(self, namespace: str, *documents: Object, check: bool = True) -> str:
        """Apply manifests."""
        items = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        return self.kubectl("apply", "--namespace", namespace, "-f", "-", stdin=json.dumps(items), check=check)

    def on_node(self, node: str, *command: str, check: bool = True) -> str:
        """Run a command as root on a node of a kind cluster; skip the test on other clusters."""
        if "E2E_KUBECONFIG" in os.environ:
            pytest.skip("needs a kind cluster with access to its nodes")
        return self._run(str(_TOOLS / "exec-on-node"), node, *command, check=check)

    def tag(self, image: str, name: str) -> None:
        """Give an image another name on the nodes that have it."""
        if "E2E_KUBECONFIG" in os.environ:
            pytest.skip("needs a kind cluster with access to its nodes")
        self._run(str(_TOOLS / "tag-image"), image, name)

    def _run(self, *command: str, stdin: str | None = None, check: bool = True) -> str:
        result = subprocess.run(
            command,
            input=stdin,
            env=os.environ | self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if check and result.returncode:
            pytest.fail(f"{' '.join(command)} exited with {result.returncode}:\n{result.stdout}")
        return result.stdout


def state_of(cluster: Cluster, namespace: str) -> str:
    """Return what is useful for diagnosis: objects, Events, and containers' logs."""
    namespace_flag = ("--namespace", namespace)
    parts = [
        cluster.kubectl("get", "all,pvc,inferenceendpoints.stoker.dev", *namespace_flag, "-o", "wide", check=False),
        cluster.kubectl("get", "inferenceendpoints.stoker.dev", *namespace_flag, "-o", "yaml", check=False),
        cluster.kubectl("get", "events", *namespace_flag, "--sort-by=.lastTimestamp", check=False),
    ]
    for pod in cluster.kubectl("get", "pods", *namespace_flag, "-o", "name", check=False).split():
        logs_command = ("logs", *namespace_flag, pod, "--all-containers", "--prefix", "--tail=100")
        before = cluster.kubectl(*logs_command, "--previous", check=False)
        if not before.startswith("Error"):
            parts.append(f"{pod}, before its restart\n{before}")
        parts.append(f"{pod}\n{cluster.kubectl(*logs_command, check=False)}")
    return "\n".join(parts)
