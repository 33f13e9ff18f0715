"""The gateway and an endpoint behind it, which these tests disturb under traffic."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from kit import chart as release
from kit.cluster import Cluster, Images
from kit.endpoint import Endpoint, demo
from kit.namespace import fresh

URL = f"http://stoker-gateway.{release.SYSTEM}.svc/v1"
#: The drain sets how long a terminating gateway pod accepts connections, and how long its requests may take.
VALUES = (
    "gateway.enabled=true",
    "gateway.tls.enabled=false",
    "gateway.drain.delaySeconds=5",
    "gateway.drain.timeoutSeconds=60",
    "gateway.resources.requests.cpu=50m",
    "gateway.resources.requests.memory=128Mi",
)


@pytest.fixture(scope="package")
def gateway(cluster: Cluster, images: Images, chart: None) -> Iterator[None]:
    """Two gateway replicas, installed by the chart."""
    release.install(cluster, images, *VALUES, f"images.gateway={images.gateway}")
    yield
    release.install(cluster, images)


@pytest.fixture(scope="package")
def endpoint(cluster: Cluster, gateway: None) -> Iterator[Endpoint]:
    """An endpoint with two pods in a namespace that has opted in. Each test leaves it serving with two pods."""
    with fresh(cluster, "behind-gateway") as namespace:
        cluster.kubectl("label", "namespace", namespace, "stoker.dev/gateway=enabled")
        endpoint = Endpoint(cluster, namespace)
        endpoint.apply(demo(replicas=2, rollout={"drainSeconds": 20}, engine={"maxModelLen": 2048}))
        endpoint.wait_ready()
        yield endpoint


@pytest.fixture
def namespace(endpoint: Endpoint) -> str:
    """The namespace that is shown when a test fails."""
    return endpoint.namespace


@pytest.fixture
def keys(cluster: Cluster, gateway: None) -> Callable[..., str]:
    """Run the keys command and return its output: ``keys("create", "--id=a")``."""

    def run(word: str, *words: str) -> str:
        command = [sys.executable, "-m", "stoker", "keys", word, f"--namespace={release.SYSTEM}", *words]
        done = subprocess.run(
            command, env={**os.environ, **cluster.environment}, stdout=subprocess.PIPE, text=True, check=True
        )
        return done.stdout.strip()

    return run


@pytest.fixture
def key(keys: Callable[..., str]) -> Iterator[str]:
    """A client's key for all models."""
    yield keys("create", "--id=traffic")
    keys("revoke", "traffic")
