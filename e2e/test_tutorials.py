"""Runs the tutorials that need pods, and the migration of tutorial 06 under traffic, without failed or cut requests.

The migration starts from a plain Deployment of this project's engine: its mechanism, a Service whose selector changes
to another set of pods, does not depend on the pods' program. `vllm/test_vllm.py` starts from vLLM.
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
def test_tutorial_shows_the_real_output(
    cluster: Cluster, chart: None, namespace: str, tutorial: Path, tmp_path: Path
) -> None:
    # The user's kubectl context has its own namespace.
    document = yaml.safe_load(cluster.kubeconfig.read_text())
    for each in document["contexts"]:
        each["context"]["namespace"] = namespace
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(document))
    run(tutorial, {**cluster.environment, "KUBECONFIG": str(kubeconfig)})


def plain(endpoint: Object, image: str) -> list[Object]:
    """Return a plain Deployment of the engine with a Service."""
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
def test_migration_costs_no_request(
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
