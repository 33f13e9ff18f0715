"""The tutorials that need pods, done; and the move that 06 describes, under traffic, 0 failed requests and 0 cut.

What is moved away from is a plain Deployment of this project's engine: what the move rests on, a Service that leads to
one set of pods and then to another, does not depend on what runs in them. With vLLM itself it is done by
`vllm/test_vllm.py`, where an image of vLLM is at hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from kit.cluster import Cluster, Images, Object
from kit.endpoint import Endpoint, demo
from kit.results import Results
from kit.traffic import traffic
from kit.waiting import wait_for

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "tutorials"))

from tutorial import run, tutorials


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tutorial", tutorials("cluster"), ids=lambda path: path.stem)
def test_a_tutorial_is_true(cluster: Cluster, chart: None, namespace: str, tutorial: Path, tmp_path: Path) -> None:
    # As a user whose kubectl is in a namespace of the user's own.
    document = yaml.safe_load(cluster.kubeconfig.read_text())
    for each in document["contexts"]:
        each["context"]["namespace"] = namespace
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(document))
    run(tutorial, {**cluster.environment, "KUBECONFIG": str(kubeconfig)})


def plain(endpoint: Object, image: str) -> list[Object]:
    """A Deployment of the engine and a Service in front of it, as people write them."""
    labels = {"app": "plain"}
    template = endpoint["spec"]["model"]["chatTemplate"]["value"]
    container = {
        "name": "server",
        "image": image,
        "args": ["serve", endpoint["spec"]["model"]["source"], f"--chat-template={template}", "--dtype=float32"],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 2},
        "resources": {"requests": {"cpu": "500m", "memory": "2Gi"}},
    }
    pods = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "plain"},
            "spec": {"selector": {"matchLabels": labels}, "template": pods},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "llm"},
            "spec": {"selector": labels, "ports": [{"port": 8000, "targetPort": "http"}]},
        },
    ]


@pytest.mark.further
@pytest.mark.timeout(900)
def test_a_move_loses_no_request(
    cluster: Cluster, images: Images, chart: None, namespace: str, results: Results
) -> None:
    in_namespace = ("--namespace", namespace)
    manifest = demo()
    cluster.apply(namespace, *plain(manifest, images.engine))
    cluster.kubectl("rollout", "status", "deployment/plain", *in_namespace, "--timeout=300s")
    with traffic(cluster, namespace, images.client, f"http://llm.{namespace}.svc:8000/v1") as flow:
        endpoint = Endpoint(cluster, namespace)
        endpoint.apply(manifest)
        endpoint.wait_ready()
        selector = {"app.kubernetes.io/instance": "demo"}
        replace = [{"op": "replace", "path": "/spec/selector", "value": selector}]
        cluster.kubectl("patch", "service", "llm", *in_namespace, "--type=json", "-p", json.dumps(replace))
        flow.wait_for(5)
        cluster.kubectl("delete", "deployment", "plain", *in_namespace)
        plain_pods = ("pods", *in_namespace, "-l", "app=plain")
        wait_for(lambda: not cluster.get(*plain_pods)["items"], "the plain pods have ended", 120)
        flow.wait_for(5)
    results.add("move from a plain Deployment", flow.result)
    flow.result.unbroken()
