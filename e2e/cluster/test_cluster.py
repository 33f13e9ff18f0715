"""The ground that the other tests stand on. When these fail, look here first."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kubernetes

if TYPE_CHECKING:
    from apiserver import ApiServer
    from kit.cluster import Cluster, Images


def eventually(condition: Callable[[], bool], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def test_api_server_alone_runs_the_controllers(apiserver: ApiServer) -> None:
    k8s: Any = kubernetes
    client = k8s.config.new_client_from_config(str(apiserver.kubeconfig))
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
    assert eventually(lambda: len(core.list_namespaced_pod("default").items) == 2)
    apps.delete_namespaced_deployment("web", "default")
    assert eventually(lambda: not core.list_namespaced_pod("default").items), "garbage is not collected"


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
    cluster.kubectl("wait", "--namespace", namespace, "pods", "--all", "--for=condition=Ready", "--timeout=60s")
    fetch = f"import urllib.request as r; print(r.urlopen('http://server.{namespace}.svc.cluster.local').status)"
    assert "200" in cluster.kubectl("exec", "--namespace", namespace, "client", "--", "python", "-c", fetch)


def test_a_cluster_that_is_slow_to_answer_is_not_made_anew(cluster: Cluster) -> None:
    (node,) = cluster.get("nodes", "-l", "node-role.kubernetes.io/control-plane")["items"]
    name = node["metadata"]["name"]
    cluster.on_node(name, "pkill", "-STOP", "-f", "^kube-apiserver")
    answers_again = threading.Timer(8, cluster.on_node, (name, "pkill", "-CONT", "-f", "^kube-apiserver"))
    answers_again.start()
    up = subprocess.run([Path(__file__).with_name("up")], capture_output=True, text=True)
    answers_again.join()
    assert up.returncode == 0
    assert "waiting for it" in up.stderr
    assert cluster.get("node", name)["metadata"]["uid"] == node["metadata"]["uid"]
