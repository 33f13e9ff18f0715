"""An operator that watches only some namespaces, with exactly the rights that the chart gives it for that."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from .operator_process import Operator

CHART = Path(__file__).parents[2] / "charts/stoker"
NAME = "confined-stoker"


@pytest.fixture
def confined(kube: Any, helm: str, ns: str, tmp_path: Path) -> Iterator[Path]:
    """The kubeconfig of a second operator, confined to the test's namespace."""
    environment = {**os.environ, "KUBECONFIG": str(kube.kubeconfig)}
    values = f"crds.install=false,webhook.enabled=false,watchNamespaces={{{ns}}}"
    namespace_flag = f"--namespace={ns}"
    subprocess.run([helm, "install", "confined", CHART, namespace_flag, "--set", values], env=environment, check=True)
    token = kube.core.create_namespaced_service_account_token(NAME, ns, {"spec": {"expirationSeconds": 3600}})
    document = yaml.safe_load(kube.kubeconfig.read_text())
    document["users"] = [{"name": each["name"], "user": {"token": token.status.token}} for each in document["users"]]
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(document))
    yield tmp_path / "kubeconfig"
    subprocess.run([helm, "uninstall", "confined", namespace_flag], env=environment, check=True)


def test_confined_operator_works_only_in_its_namespaces(
    kube: Any, ns: str, document: Any, eventually: Any, sleeping_operator: Any, confined: Path, tmp_path: Path
) -> None:
    sleeping_operator.stop()
    options = [
        f"--namespace={ns}", "--leader-elect", f"--lease-name={NAME}", f"--operator-namespace={ns}",
        "--resync-seconds=5",
    ]  # fmt: skip
    kube.create("default", document("elsewhere"))
    try:
        with Operator(confined, tmp_path / "log", *options):
            kube.create(ns, document("here", replicas=2))
            eventually(lambda: kube.condition(ns, "here"), "its own endpoint is reconciled")
            budget = f"/apis/policy/v1/namespaces/{ns}/poddisruptionbudgets/here"
            eventually(lambda: kube.get(budget), "two pods have a budget")
            kube.patch(ns, "here", {"replicas": 1})
            eventually(lambda: not exists(kube, budget), "one has none")
            assert kube.condition("default", "elsewhere") == {}
    finally:
        kube.delete("default", "elsewhere")


def exists(kube: Any, path: str) -> bool:
    try:
        kube.get(path)
    except Exception as error:
        if getattr(error, "status", 0) != 404:
            raise
        return False
    return True
