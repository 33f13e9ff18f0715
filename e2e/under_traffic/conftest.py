"""The endpoint that these tests disturb under traffic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.cluster import Cluster
from kit.endpoint import Endpoint, demo
from kit.namespace import fresh


@pytest.fixture(scope="package")
def endpoint(cluster: Cluster, chart: None) -> Iterator[Endpoint]:
    """One with two pods for all of these: each test leaves it serving with two. It computes its longest prompt in less
    than it has for its drain."""
    with fresh(cluster, "under-traffic") as namespace:
        endpoint = Endpoint(cluster, namespace)
        endpoint.apply(demo(replicas=2, rollout={"drainSeconds": 20}, engine={"maxModelLen": 2048}))
        endpoint.wait_ready()
        yield endpoint


@pytest.fixture
def namespace(endpoint: Endpoint) -> str:
    """What is shown when a test fails."""
    return endpoint.namespace
