"""What the end-to-end tests stand on: an API server alone, or a cluster with the project's images, and a namespace.

`pytest e2e` makes whatever is missing and leaves the cluster running, so that the next run starts at once;
`e2e/cluster/down` removes it. E2E_KUBECONFIG names a cluster of your own to use instead (with the images in reach of
its nodes).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "cluster"))

from apiserver import ApiServer  # noqa: E402


@dataclass(frozen=True)
class Cluster:
    """A running cluster, through the programs that people use on it."""

    environment: dict[str, str]

    @property
    def kubeconfig(self) -> Path:
        return Path(self.environment["KUBECONFIG"])

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        return self._run("kubectl", *arguments, stdin=stdin, check=check)

    def helm(self, *arguments: str) -> str:
        return self._run("helm", *arguments)

    def get(self, *arguments: str) -> Any:
        """What `kubectl get ... -o json` prints, parsed."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

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


@dataclass(frozen=True)
class Images:
    """The project's images, where the cluster's nodes find them."""

    operator: str
    engine: str
    client: str


@pytest.fixture(scope="session")
def apiserver() -> Iterator[ApiServer]:
    """A real API server and its controllers, without nodes."""
    with ApiServer() as server:
        yield server


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """A whole cluster: yours, or kind."""
    shell = 'exports=$("$0") && eval "$exports" && echo "$KUBECONFIG" && echo "$PATH"'
    started = subprocess.run(
        ["bash", "-c", shell, HERE / "cluster" / "up"], stdout=subprocess.PIPE, text=True, check=True
    )
    kubeconfig, path = started.stdout.splitlines()
    return Cluster({"KUBECONFIG": kubeconfig, "PATH": path})


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> Images:
    """Built from this checkout and on the nodes; for a cluster of your own, only their names."""
    tag = os.environ.setdefault("TAG", "dev")
    images = Images(*(f"stoker/{name}:{tag}" for name in ("operator", "engine-cpu", "e2e-client")))
    if "E2E_KUBECONFIG" not in os.environ:
        subprocess.run([HERE.parent / "images" / "build", "operator", "engine-cpu", "e2e-client"], check=True)
        for image in (images.operator, images.engine, images.client):
            subprocess.run([HERE / "cluster" / "load", image], check=True)
    return images


@pytest.fixture
def namespace(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[str]:
    """A fresh namespace, deleted after the test. When the test fails, its report shows what was in it."""
    test = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:40]
    name = f"{test}-{uuid.uuid4().hex[:6]}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fixtures: dict[str, Any] = getattr(item, "funcargs", {})
    if report.when == "call" and report.failed and "namespace" in fixtures:
        report.sections.append(("namespace", state_of(fixtures["cluster"], fixtures["namespace"])))
    return report


def state_of(cluster: Cluster, namespace: str) -> str:
    """All that a person would ask first: the objects, what happened to them, and what the containers said."""
    here = ("--namespace", namespace)
    parts = [
        cluster.kubectl("get", "all,inferenceendpoints.stoker.dev", *here, "-o", "wide", check=False),
        cluster.kubectl("get", "inferenceendpoints.stoker.dev", *here, "-o", "yaml", check=False),
        cluster.kubectl("get", "events", *here, "--sort-by=.lastTimestamp", check=False),
    ]
    for pod in cluster.kubectl("get", "pods", *here, "-o", "name", check=False).split():
        log = cluster.kubectl("logs", *here, pod, "--all-containers", "--prefix", "--tail=100", check=False)
        parts.append(f"{pod}\n{log}")
    return "\n".join(parts)
