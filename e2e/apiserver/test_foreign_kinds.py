"""Other projects' kinds with their real schemas: the Prometheus operator's PodMonitor, cert-manager's Certificate and
Issuer. The schemas accept the objects of the chart and the operator, and PodMonitors are created as soon as the cluster
has the kind.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config
from prometheus_client.parser import text_string_to_metric_families

from stoker_operator.cluster.informer import Watched
from stoker_operator.manager.handlers import OptionalWatches
from stoker_operator.settings import Settings

from .operator_process import Operator

CHART = Path(__file__).parents[2] / "charts/stoker"
CERT_MANAGER = "v1.21.2"
CRD = "podmonitors.monitoring.coreos.com"
MONITORS = "/apis/monitoring.coreos.com/v1/namespaces/{}/podmonitors"
VALUES = {
    ("Certificate", "Issuer"): "webhook.certificate=cert-manager",
    ("Certificate",): (
        "webhook.certificate=cert-manager,webhook.certManager.issuerRef.name=mine,"
        "webhook.certManager.issuerRef.kind=ClusterIssuer,webhook.certManager.issuerRef.group=cert-manager.io"
    ),
    ("PodMonitor",): "monitoring.podMonitor=Enabled,monitoring.labels.release=prometheus",
}


@pytest.fixture
def cert_manager(foreign: Any, define: Any) -> None:
    """Make the API server serve Certificates and Issuers."""
    files = [f"deploy/crds/cert-manager.io_{kind}.yaml" for kind in ("certificates", "issuers")]
    define(foreign("github.com/cert-manager/cert-manager", CERT_MANAGER, *files))


def test_objects_of_foreign_kinds_match_their_schemas(
    kube: Any, helm: str, ns: str, cert_manager: None, pod_monitors: None
) -> None:
    for kinds, values in VALUES.items():
        command = [helm, "template", "fresh", CHART, f"--namespace={ns}", "--set", values]
        rendered = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        theirs = [each for each in yaml.safe_load_all(rendered) if each and each["kind"] in kinds]
        assert len(theirs) == len(kinds)
        for each in theirs:
            assert dry_run(kube, ns, each) == 201
            each["spec"]["nonsense"] = 1
            with pytest.raises(client.ApiException, match="nonsense"):  # shows that their schema validates
                dry_run(kube, ns, each)


def dry_run(kube: Any, ns: str, body: Any) -> int:
    """Create an object in a strict dry run, and return the status code.

    Raises:
        ApiException: it is refused.
    """
    path = f"/apis/{body['apiVersion']}/namespaces/{ns}/{body['kind'].lower()}s"
    header = {"Content-Type": "application/json", "Accept": "application/json"}
    query = [("dryRun", "All"), ("fieldValidation", "Strict")]
    request = kube.api.param_serialize("POST", path, header_params=header, body=body, query_params=query)
    response = kube.api.call_api(*request)
    text = response.read()
    if response.status >= 400:
        raise client.ApiException(status=response.status, reason=text.decode())
    status: int = response.status
    return status


def test_chart_detects_the_kinds_of_the_cluster(kube: Any, helm: str, ns: str, define_pod_monitors: Any) -> None:
    command = [helm, "install", "fresh", CHART, f"--namespace={ns}", "--set=crds.install=false,webhook.enabled=false"]
    command += ["--dry-run=server"]
    environment = {**os.environ, "KUBECONFIG": str(kube.kubeconfig)}

    def monitors() -> int:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.count("\nkind: PodMonitor\n")

    assert monitors() == 0
    define_pod_monitors()
    assert monitors() == 1


def is_watched(kube: Any, resource: str) -> bool:
    """Return whether a client watches a resource in one namespace; the API server's own watch all namespaces."""
    request = kube.api.param_serialize("GET", "/metrics", header_params={"Accept": "text/plain"})
    text = kube.api.call_api(*request).read().decode()
    labels = {"resource": resource, "scope": "namespace", "verb": "WATCH"}
    return any(
        sample.value > 0 and labels.items() <= sample.labels.items()
        for family in text_string_to_metric_families(text)
        if family.name == "apiserver_longrunning_requests"
        for sample in family.samples
    )


def test_pod_monitors_are_created_once_the_kind_exists(
    kube: Any, ns: str, document: Any, eventually: Any, sleeping_operator: Any, define_pod_monitors: Any, tmp_path: Path
) -> None:
    """The operator was started before the Prometheus operator was installed."""
    sleeping_operator.stop()
    with Operator(sleeping_operator.kubeconfig, tmp_path / "log", f"--namespace={ns}", "--resync-seconds=2"):
        kube.create(ns, document("plain"))
        tls = {"runtime": "vllm", "image": "v", "args": ["--ssl-certfile=/tls/tls.crt", "--ssl-keyfile=/tls/tls.key"]}
        model = {"source": "hf://org/name"}
        kube.create(ns, document("tls", engine=tls, model=model, hardware={"accelerator": "nvidia-l4"}))
        kube.create(ns, document("unwatched", monitoring={"podMonitor": "Disabled"}))
        insists = document("insists", monitoring={"podMonitor": "Enabled"})
        kube.create(ns, insists)
        eventually(lambda: kube.condition(ns, "insists").get("reason") == "NoPodMonitors", "it says what is missing")
        define_pod_monitors()
        known = {"plain", "tls", "insists"}
        eventually(
            lambda: {each["metadata"]["name"] for each in kube.get(MONITORS.format(ns))["items"]} == known,
            "there are PodMonitors",
        )
        eventually(lambda: kube.condition(ns, "insists").get("reason") == "RollingOut", "nothing is missing")
        # The watch starts after the lists that found the objects; the audit log has it only once it has ended.
        eventually(lambda: is_watched(kube, "podmonitors"), "PodMonitors are watched")
    watches = [each["objectRef"] for each in kube.server.requests() if each["verb"] == "watch" and "objectRef" in each]
    assert ("podmonitors", ns) in {(each["resource"], each.get("namespace")) for each in watches}
    endpoints = {
        each["metadata"]["name"]: each["spec"]["podMetricsEndpoints"] for each in kube.get(MONITORS.format(ns))["items"]
    }
    assert endpoints["plain"] == [{"port": "http", "path": "/metrics"}]
    assert endpoints["tls"][0]["scheme"] == "https"


def test_operator_survives_the_removal_of_a_kind(
    kube: Any, ns: str, document: Any, eventually: Any, sleeping_operator: Any, define_pod_monitors: Any, tmp_path: Path
) -> None:
    """The Prometheus operator may be reinstalled at any time; the operator then watches the kind again."""

    def monitored() -> bool:
        return [each["metadata"]["name"] for each in kube.get(MONITORS.format(ns))["items"]] == ["plain"]

    def is_watched() -> bool:
        # The number of log lines is not fixed: the API server may still list a kind that is being removed.
        logged = log.read_text()
        return logged.rfind("podmonitors; watching them") > logged.rfind("stopped watching podmonitors")

    sleeping_operator.stop()
    define_pod_monitors()
    log = tmp_path / "log"
    with Operator(sleeping_operator.kubeconfig, log, f"--namespace={ns}", "--resync-seconds=2"):
        kube.create(ns, document("plain"))
        for pause in (0.5, 0, 0.1):  # removed during the watch, before it, and at the same time
            eventually(monitored, "there is a PodMonitor")
            eventually(is_watched, "it is watched")
            time.sleep(pause)  # sleeps: moment of the removal
            kube.extensions.delete_custom_resource_definition(CRD)
            eventually(lambda: not is_watched(), "its end is noticed")
            define_pod_monitors()
        eventually(monitored, "there is a PodMonitor")


def test_watch_of_a_removed_kind_ends(kube: Any, ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator does not wait for the kind: a later discovery may find it again."""
    monkeypatch.setattr(config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(kube.kubeconfig))
    watches, ended = OptionalWatches(Settings(namespaces=(ns,))), threading.Event()
    try:
        watches.begin((Watched("Gone", "monitoring.coreos.com", "v1", "gones"),), lambda *_: None, ended.set)
        assert ended.wait(120)
    finally:
        watches.stop()
