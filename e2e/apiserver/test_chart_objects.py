"""The API server accepts the rendered chart, and the chart's scripts work with it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from apiserver import kube_binary

CHART = Path(__file__).parents[2] / "charts/stoker"
#: Other projects' kinds, which a bare cluster does not have.
FOREIGN = {"PodMonitor", "ServiceMonitor", "PrometheusRule", "Certificate", "Issuer"}

VALUES: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "confined": ("watchNamespaces={default}", "replicas=1", "crds.keep=false"),
    "without a webhook": ("webhook.enabled=false", "crds.install=false"),
    "cert-manager": ("webhook.certificate=cert-manager", "webhook.failurePolicy=Fail"),
    "all of it": (
        "monitoring.podMonitor=Enabled",
        "monitoring.dashboards.enabled=true",
        "endpoints.demo.namespace=default",
        "endpoints.demo.spec.model.source=demo://gemma-3-270m",
        "endpoints.demo.spec.hardware.accelerator=cpu",
        "images.pullSecrets[0].name=mine",
        "nodeSelector.a=b",
        "tolerations[0].operator=Exists",
        "priorityClassName=system-cluster-critical",
        "podLabels.a=b",
        "podAnnotations.a=b",
        "serviceAccount.annotations.a=b",
        "monitoring.dashboards.annotations.a=b",
        "monitoring.alerts.enabled=true",
        "networkPolicy.gateway[0].ipBlock.cidr=10.0.0.0/8",
        "env[0].name=A",
        "env[0].value=b",
    ),
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_every_object_passes_a_strict_dry_run(kube: Any, helm: str, ns: str, values: tuple[str, ...]) -> None:
    command = [helm, "template", "fresh", CHART, f"--namespace={ns}", *(f"--set={value}" for value in values)]
    rendered = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    documents = [each for each in yaml.safe_load_all(rendered) if each]
    builtin = [each for each in documents if each["kind"] not in FOREIGN]
    assert len(builtin) > 5
    for each in builtin:
        if each["kind"] == "ServiceAccount":  # a pod is accepted only if its account exists
            kube.core.create_namespaced_service_account(ns, each)
    check(kube, builtin)


def check(kube: Any, documents: list[Any]) -> None:
    """Apply the documents in a strict dry run."""
    applied = subprocess.run(
        ["kubectl", "apply", "--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts", "-f", "-"],
        executable=kube_binary(),
        env={**os.environ, "KUBECONFIG": str(kube.kubeconfig)},
        input=json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}),
        capture_output=True,
        text=True,
    )
    assert applied.returncode == 0, applied.stderr
    assert "Warning" not in applied.stderr, applied.stderr
    assert len(applied.stdout.splitlines()) == len(documents)


def test_monitors_and_alerts_match_the_prometheus_operators_schema(
    kube: Any, helm: str, ns: str, foreign: Any, define: Any
) -> None:
    folder = "example/prometheus-operator-crd/monitoring.coreos.com"
    kinds = ("PodMonitor", "ServiceMonitor", "PrometheusRule")
    files = (f"{folder}_{kind.lower()}s.yaml" for kind in kinds)
    define(foreign("github.com/prometheus-operator/prometheus-operator", "v0.85.0", *files))
    for kind, gateway, count in (("PodMonitor", "false", 2), ("PodMonitor", "true", 3), ("ServiceMonitor", "true", 4)):
        values = (f"monitoring.kind={kind}", "monitoring.podMonitor=Enabled", "monitoring.alerts.enabled=true")
        values += (f"gateway.enabled={gateway}",)
        labels = ("monitoring.labels.release=a", "monitoring.endpointLabels.release=b", "monitoring.alerts.labels.c=d")
        command = [
            helm,
            "template",
            "fresh",
            CHART,
            f"--namespace={ns}",
            *(f"--set={each}" for each in values + labels),
        ]
        rendered = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        documents = [each for each in yaml.safe_load_all(rendered) if each and each["kind"] in kinds]
        assert len(documents) == count
        check(kube, documents)


def script(kube: Any, name: str, *arguments: str, patience: str = "") -> subprocess.CompletedProcess[str]:
    """Run a script of the chart as its pod does; `patience` replaces the seconds that it waits."""
    text = (CHART / "files" / name).read_text()
    if patience:
        text, changed = re.subn(r"^SECONDS = \d+", f"SECONDS = {patience}", text, flags=re.MULTILINE)
        assert changed == 1
    return subprocess.run(
        [sys.executable, "-c", text, *arguments],
        env={**os.environ, "KUBECONFIG": str(kube.kubeconfig)},
        capture_output=True,
        text=True,
        timeout=90,
    )


def test_endpoints_of_the_values_are_applied(kube: Any, helm: str, ns: str) -> None:
    values = [f"--values={CHART / 'examples/demo-model.yaml'}", f"--set=endpoints.demo.namespace={ns}"]
    command = [helm, "template", "stoker", CHART, *values]
    documents = yaml.safe_load_all(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    (job,) = [each for each in documents if each and each["metadata"]["name"] == "stoker-endpoints" and "spec" in each]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][0].strip() == (CHART / "files/apply_endpoints.py").read_text().strip()
    for _ in range(2):  # the second run is an upgrade
        done = script(kube, "apply_endpoints.py", container["args"][1])
        assert (done.returncode, done.stdout) == (0, "applied demo\n"), done.stderr
        endpoint = kube.endpoint(ns, "demo")
        assert endpoint["metadata"]["generation"] == 1
    assert endpoint["spec"]["model"]["source"] == "demo://gemma-3-270m"

    (manifest,) = json.loads(container["args"][1])
    manifest["spec"]["replicaz"] = 2
    refused = script(kube, "apply_endpoints.py", json.dumps([manifest]))
    assert refused.returncode == 1
    assert refused.stderr.count("replicaz") == 1, "it is not tried again: time does not fix it"


def test_helm_test_reports_whether_the_webhook_works(kube: Any, ns: str, start: Any, configuration: Any) -> None:
    without = script(kube, "helm_test.py", ns, "accepts")
    assert without.returncode == 0, without.stderr
    kube.core.patch_namespace(ns, {"metadata": {"labels": {"webhook": "called"}}})
    configuration.call(start())
    works = script(kube, "helm_test.py", ns, "refuses")
    assert works.returncode == 0, works.stderr
    assert "refuses one whose hardware is not in the catalogue" in works.stdout
    kube.core.patch_namespace(ns, {"metadata": {"labels": {"webhook": "not-called"}}})
    fails = script(kube, "helm_test.py", ns, "refuses", patience="3")
    assert fails.returncode == 1
    assert "the webhook is not called" in fails.stderr
