"""Tests of the cluster itself, on which all other tests depend. If these fail, look here first."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes
import pytest
from apiserver import ApiServer
from kit.cluster import Cluster, Images
from kit.waiting import wait_for


@pytest.fixture
def alone() -> Iterator[ApiServer]:
    """A separate API server instead of the session's, which would use the CPUs during the other tests."""
    with ApiServer() as server:
        yield server


def test_api_server_alone_runs_the_controllers(alone: ApiServer) -> None:
    k8s: Any = kubernetes
    client = k8s.config.new_client_from_config(str(alone.kubeconfig))
    core, apps = k8s.client.CoreV1Api(client), k8s.client.AppsV1Api(client)
    labels = {"app": "web"}
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "web", "image": "web:none"}]},
    }
    deployment = {
        "metadata": {"name": "web"},
        "spec": {"replicas": 2, "selector": {"matchLabels": labels}, "template": template},
    }
    apps.create_namespaced_deployment("default", deployment)
    wait_for(lambda: len(core.list_namespaced_pod("default").items) == 2, "two pods are made", 120, every=0.1)
    apps.delete_namespaced_deployment("web", "default")
    wait_for(lambda: not core.list_namespaced_pod("default").items, "garbage is collected", 120, every=0.1)


def test_service_answers_by_its_dns_name(cluster: Cluster, images: Images, namespace: str) -> None:
    server = ["python", "-m", "http.server", "--directory", "/etc/ssl"]
    ready = {"httpGet": {"port": 8000, "path": "/"}, "periodSeconds": 1}
    for name, command, probe in [("server", server, ready), ("client", ["sleep", "600"], None)]:
        container = {"name": name, "image": images.client, "command": command, "readinessProbe": probe}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": name}},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
        }
        cluster.kubectl("apply", "--namespace", namespace, "-f", "-", stdin=json.dumps(pod))
    cluster.kubectl("expose", "pod", "server", "--namespace", namespace, "--port=80", "--target-port=8000")
    cluster.kubectl("wait", "--namespace", namespace, "pods", "--all", "--for=condition=Ready", "--timeout=180s")
    url = f"http://server.{namespace}.svc.cluster.local"
    fetch = f"import urllib.request as r; print(r.urlopen('{url}', timeout=5).status)"
    ask = ("exec", "--namespace", namespace, "client", "--", "python", "-c", fetch)

    def answered() -> bool:  # the client's node learns later than the API server that the pod is ready
        return cluster.kubectl(*ask, check=False).splitlines()[-1:] == ["200"]

    wait_for(answered, "the Service answers", 60)


@pytest.mark.timeout(300)
def test_slow_cluster_is_not_created_again(cluster: Cluster) -> None:
    (node,) = cluster.get("nodes", "-l", "node-role.kubernetes.io/control-plane")["items"]
    name = node["metadata"]["name"]
    stderr = ""
    cluster.on_node(name, "pkill", "-STOP", "-f", "^kube-apiserver")
    try:
        up = subprocess.Popen(
            [Path(__file__).with_name("up")], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert up.stderr
        while "waiting up to" not in stderr and (line := up.stderr.readline()):
            stderr += line
    finally:
        cluster.on_node(name, "pkill", "-CONT", "-f", "^kube-apiserver")
    stderr += up.stderr.read()
    assert up.wait() == 0, stderr
    assert "waiting up to" in stderr
    assert cluster.get("node", name)["metadata"]["uid"] == node["metadata"]["uid"]
