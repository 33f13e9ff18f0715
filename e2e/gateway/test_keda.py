"""KEDA, and a HorizontalPodAutoscaler with KEDA's external metrics, scale an endpoint from zero to two pods and back,
by the gateway's external push scaler. Clients do not retry.

It needs KEDA's programs: ``KEDA=$(e2e/keda/build) make e2e K=keda``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit import chart as release
from kit import hub as hubs
from kit import keda
from kit.cluster import Cluster, Images, Object
from kit.endpoint import Endpoint
from kit.namespace import fresh
from kit.tiny import tiny, tiny_llama
from kit.waiting import wait_for

from .conftest import VALUES
from .test_scaling import all_answered, burst

pytestmark = [
    pytest.mark.skipif("KEDA" not in os.environ, reason="KEDA=$(e2e/keda/build) names KEDA's programs"),
    pytest.mark.timeout(1200),
]

#: Seconds without requests after which KEDA sets 0 replicas.
_COOLDOWN_S = 5
#: Time for an idle endpoint to reach zero, including the autoscaler's period and the end of pods, in seconds.
_TO_ZERO_S = 240
#: Start times of requests, which span several periods of a HorizontalPodAutoscaler; each takes seconds.
_TIMES = [2.0 * each for each in range(30)]
_TOKENS = 2000
_METRIC = "pending-requests"
_QUICK = {"scaleDown": {"stabilizationWindowSeconds": 5}}


@pytest.fixture(scope="module")
def scaled(
    cluster: Cluster, images: Images, gateway: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Endpoint]:
    """An endpoint without ``spec.scaling``, of a model that loads in seconds."""
    image = f"images.gateway={images.gateway}"
    release.install(cluster, images, *VALUES, image, "gateway.externalScaler.enabled=true")
    with keda.installed(cluster, Path(os.environ["KEDA"])), fresh(cluster, "keda") as namespace:
        cluster.kubectl("label", "namespace", namespace, "stoker.dev/gateway=enabled")
        hub = hubs.start(cluster, namespace, images.client, tiny_llama(tmp_path_factory.mktemp("model")))
        document = tiny(hub.url, "scaled")
        document["spec"]["model"]["servedNames"] = ["scaled"]
        endpoint = Endpoint(cluster, namespace, "scaled")
        endpoint.apply(document)
        endpoint.wait_ready()
        yield endpoint
    release.install(cluster, images, *VALUES, image)


@pytest.fixture
def namespace(scaled: Endpoint) -> str:
    """The namespace that is shown when a test fails."""
    return scaled.namespace


def scaled_object(**annotations: str) -> Object:
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": "scaled", "annotations": annotations},
        "spec": {
            "scaleTargetRef": {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceEndpoint", "name": "scaled"},
            "minReplicaCount": 0,
            "maxReplicaCount": 3,
            "cooldownPeriod": _COOLDOWN_S,
            "pollingInterval": 5,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _QUICK}},
            "triggers": [
                {
                    "type": "external-push",
                    "metadata": {
                        "scalerAddress": f"stoker-gateway-scaler.{release.SYSTEM}.svc:8083",
                        "inferenceEndpoint": "scaled",
                        "metric": "pendingRequests",
                        "target": "2",
                    },
                }
            ],
        },
    }


def horizontal_pod_autoscaler() -> Object:
    selector = {"matchLabels": {"scaledobject.keda.sh/name": "scaled"}}
    external = {
        "metric": {"name": f"s0-{_METRIC}", "selector": selector},
        "target": {"type": "AverageValue", "averageValue": "2"},
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "own"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceEndpoint", "name": "scaled"},
            "minReplicas": 0,
            "maxReplicas": 3,
            "behavior": _QUICK,
            "metrics": [{"type": "External", "external": external}],
        },
    }


def wait_zero(endpoint: Endpoint) -> None:
    selector = ("-l", "app.kubernetes.io/instance=scaled", "--namespace", endpoint.namespace)

    def is_zero() -> bool:
        return endpoint.get()["spec"]["replicas"] == 0 and not endpoint.cluster.get("pods", *selector)["items"]

    wait_for(is_zero, "it is scaled to zero", _TO_ZERO_S)


def _is_known(endpoint: Endpoint) -> bool:
    found = endpoint.cluster.get("scaledobject", "scaled", "--namespace", endpoint.namespace)
    return "scaleTargetGVKR" in found.get("status", {})


def test_keda_scales_from_zero_and_back(scaled: Endpoint, images: Images, key: str) -> None:
    scaled.cluster.apply(scaled.namespace, scaled_object())
    wait_zero(scaled)
    with burst(scaled, images, key, _TIMES, tokens=_TOKENS) as answers:
        wait_for(lambda: len(scaled.pods()) >= 2, "a second pod", 180)
    all_answered(answers)
    assert answers[0].held > 0
    wait_zero(scaled)
    scaled.cluster.kubectl("delete", "scaledobject", "scaled", "--namespace", scaled.namespace, "--timeout=60s")


def test_a_horizontal_pod_autoscaler_scales_from_zero_and_back(scaled: Endpoint, images: Images, key: str) -> None:
    """KEDA only serves the metric: its ScaledObject is paused, and the autoscaler sets the replicas, also 0."""
    cluster, where = scaled.cluster, ("--namespace", scaled.namespace)
    cluster.apply(scaled.namespace, scaled_object())
    wait_for(lambda: _is_known(scaled), "KEDA knows its target, without which it serves no metric", 60)
    cluster.apply(scaled.namespace, scaled_object(**{"autoscaling.keda.sh/paused": "true"}))
    cluster.apply(scaled.namespace, horizontal_pod_autoscaler())
    wait_zero(scaled)
    with burst(scaled, images, key, _TIMES, tokens=_TOKENS) as answers:
        wait_for(lambda: len(scaled.pods()) >= 2, "a second pod", 180)
    all_answered(answers)
    assert answers[0].held > 0
    wait_zero(scaled)
    cluster.kubectl("delete", "hpa", "own", *where)
