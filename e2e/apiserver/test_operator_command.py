"""``stoker operator`` as a process: watched namespaces, HTTP endpoints, termination."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from apiserver import ApiServer
from kubernetes import client, config

from stoker_operator.api.v1alpha1.crd import crd

from .operator_process import Operator, get


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "stoker", "operator", *options]


def test_missing_cluster_is_reported(tmp_path: Path) -> None:
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path)}
    environment.pop("KUBERNETES_SERVICE_HOST", None)
    result = subprocess.run(command(), env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.startswith("stoker operator: no cluster: ")
    assert len((result.stdout + result.stderr).splitlines()) == 1


def test_malformed_catalogue_is_refused(tmp_path: Path) -> None:
    (tmp_path / "catalogue.yaml").write_text("nonsense: 1")
    result = subprocess.run(
        command("--catalogue", str(tmp_path / "catalogue.yaml")), capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert "nonsense" in result.stderr


def test_address_in_use_ends_the_operator(kube: Any, sleeping_operator: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        started = command(f"--health-address={address}")
        result = subprocess.run(started, env=sleeping_operator.environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "stoker operator: cannot start: " in result.stderr
    assert "Traceback" not in result.stderr


def test_operator_reconciles_only_its_namespaces(
    kube: Any, ns: str, document: Any, eventually: Any, sleeping_operator: Any, tmp_path: Path
) -> None:
    """It sees changes by other clients in its namespace, answers probes, and ends on SIGTERM."""
    sleeping_operator.stop()
    kube.create("default", document("not-mine"))
    try:
        with Operator(sleeping_operator.kubeconfig, tmp_path / "log", "--namespace", ns) as operator:
            kube.create(ns, document("mine"))
            eventually(lambda: kube.condition(ns, "mine"), "its own endpoint is reconciled")
            assert kube.condition("default", "not-mine") == {}
            assert get(operator.health, "/healthz")[0] == 200
    finally:
        kube.delete("default", "not-mine")


@pytest.mark.slow
def test_removed_crd_ends_the_operator_with_the_remedy(tmp_path: Path) -> None:
    definition = crd()
    log = tmp_path / "log"
    with ApiServer(controller_manager=False) as server:
        api = client.ApiextensionsV1Api(config.new_client_from_config(str(server.kubeconfig)))
        api.create_custom_resource_definition(definition)
        operator = Operator(server.kubeconfig, log)
        operator.start()
        process = operator.process
        assert process
        try:
            api.delete_custom_resource_definition(definition["metadata"]["name"])
            code = process.wait(timeout=60)
        finally:
            process.kill()
    logged = log.read_text()
    assert code == 1, logged
    assert "Traceback" not in logged, logged
    assert "the cluster no longer has inferenceendpoints" in logged and "Helm chart" in logged
