"""kopf's connection to the cluster."""

from __future__ import annotations

from pathlib import Path

import kopf
import pytest
import yaml
from kubernetes.config import incluster_config

from stoker_operator.cluster.kube import Kube
from stoker_operator.manager.handlers import login


@pytest.mark.parametrize(
    ("has_kubeconfig", "expected"),
    [(True, ("https://named:6443", "secret")), (False, ("https://10.96.0.1:443", "pod"))],
)
def test_kopf_watches_the_cluster_that_the_operator_writes_to(
    has_kubeconfig: bool, expected: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    for name, content in (("TOKEN", "pod"), ("CERT", "certificate")):
        (tmp_path / name).write_text(content)
        monkeypatch.setattr(incluster_config, f"SERVICE_{name}_FILENAME", str(tmp_path / name))
    if has_kubeconfig:
        document = {
            "clusters": [{"name": "c", "cluster": {"server": "https://named:6443"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {"token": "secret"}}],
            "current-context": "c",
        }
        (tmp_path / "config").write_text(yaml.safe_dump(document))
    for module in ("kubernetes.config", "kubernetes.config.kube_config"):  # read on import
        monkeypatch.setattr(f"{module}.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    read = login(settings=kopf.OperatorSettings())
    configuration = Kube.connect()._api.configuration
    written_to = configuration.host, configuration.api_key["BearerToken"].rpartition(" ")[2]
    assert (read.server, read.token) == written_to == expected
    assert (read.scheme or "").lower() == "bearer"
