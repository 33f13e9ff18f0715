"""The endpoint that these tests disturb under traffic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.cluster import Cluster
from kit.endpoint import Endpoint, demo
from kit.namespace import fresh


@pytest.fixture(scope="package")
def endpoint(cluster: Cluster, chart: None) -> Iterator[Endpoint]:
    """An endpoint with two pods for all of these tests. Each test leaves it serving with two.

    It computes its longest prompt within `drainSeconds`.
    """
    with fresh(cluster, "under-traffic") as namespace:
        endpoint = Endpoint(cluster, namespace)
        endpoint.apply(demo(replicas=2, rollout={"drainSeconds": 20}, engine={"maxModelLen": 2048}))
        endpoint.wait_ready()
        yield endpoint


@pytest.fixture
def namespace(endpoint: Endpoint) -> str:
    """The namespace that is shown when a test fails."""
    return endpoint.namespace
