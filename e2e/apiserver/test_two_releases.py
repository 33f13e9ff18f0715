"""Two releases of the chart in one cluster, and a release that moves to another namespace."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from .cluster_client import GROUP, PLURAL, SYSTEM
from .operator_process import Operator
from .test_chart import CHART

CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


class Helm:
    """Helm with an administrator's rights."""

    def __init__(self, program: str, kube: Any) -> None:
        self.program = program
        self.environment = {**os.environ, "KUBECONFIG": str(kube.kubeconfig)}

    def __call__(self, *words: str) -> str:
        """Run helm; return its output, or its error message."""
        command = [self.program, *words]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return done.stderr if done.returncode else done.stdout

    def install(self, release: str, namespace: str, values: str, *options: str) -> str:
        """Install the chart without the objects that exist once per cluster."""
        values = f"crds.install=false,rbac.aggregate=false,{values}"
        return self("install", release, str(CHART), f"--namespace={namespace}", f"--set={values}", *options)


@pytest.fixture
def run_helm(kube: Any, helm: str, ns: str) -> Iterator[Helm]:
    """Helm; the releases in the test's namespace are uninstalled at the end."""
    run = Helm(helm, kube)
    yield run
    for release in run("list", "--short", f"--namespace={ns}").split():
        run("uninstall", release, f"--namespace={ns}")


@pytest.fixture
def watch(kube: Any) -> Iterator[Callable[[list[str]], None]]:
    """Make the webhook of the fixture's release validate these namespaces until the end of the test."""
    admission = client.AdmissionregistrationV1Api(kube.api)
    path = "/webhooks/0/namespaceSelector"
    before = kube.get(f"{CONFIGURATIONS}/stoker")["webhooks"][0]["namespaceSelector"]

    def select(value: Any) -> None:
        change = [{"op": "replace", "path": path, "value": value}]
        admission.patch_validating_webhook_configuration("stoker", change)

    def these(namespaces: list[str]) -> None:
        select({"matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": namespaces}]})

    yield these
    select(before)


def test_install_over_another_releases_namespaces_is_refused(
    kube: Any, run_helm: Helm, watch: Callable[[list[str]], None], ns: str
) -> None:
    there = f"release stoker in namespace {SYSTEM} already watches "
    dry = "--dry-run=server"
    assert f"{there}all namespaces," in run_helm.install("second", ns, "webhook.enabled=true", dry)
    assert f"{there}{ns}," in run_helm.install("second", ns, f"watchNamespaces={{{ns}}}", dry)
    assert there not in run_helm.install("second", ns, "webhook.enabled=false", dry)
    watch(["one", "two"])
    assert f"{there}one, two," in run_helm.install("second", ns, "webhook.enabled=true", dry)
    assert f"{there}two," in run_helm.install("second", ns, "watchNamespaces={three,two}", dry)
    assert "STATUS: pending-install" in run_helm.install("second", ns, "watchNamespaces={three}", dry)
    # A release's own webhook does not obstruct its upgrade.
    watch([ns])
    again = run_helm("upgrade", "--install", "stoker", str(CHART), f"--namespace={SYSTEM}", dry)
    assert "STATUS: pending-upgrade" in again


def test_a_release_may_move_to_another_namespace(kube: Any, run_helm: Helm, ns: str) -> None:
    """As docs/guides/operations.md describes: the CRD remained, and names its release."""
    definition = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{PLURAL}.{GROUP}"
    before = kube.get(definition)["metadata"]["annotations"]
    values = "crds.install=true,rbac.aggregate=false,webhook.enabled=false"
    command = ("install", "moved", str(CHART), f"--namespace={ns}", f"--set={values}")
    try:
        assert "meta.helm.sh/release-namespace" in run_helm(*command)
        assert "STATUS: deployed" in run_helm(*command, "--take-ownership")
        assert kube.get(definition)["metadata"]["annotations"]["meta.helm.sh/release-namespace"] == ns
        assert "STATUS: deployed" in run_helm("upgrade", *command[1:])
    finally:
        owner = {name: value for name, value in before.items() if name.startswith("meta.helm.sh/")}
        kube.extensions.patch_custom_resource_definition(f"{PLURAL}.{GROUP}", {"metadata": {"annotations": owner}})


def test_one_of_two_operators_serves_an_endpoint(
    kube: Any, ns: str, document: Any, eventually: Any, sleeping_operator: Operator, tmp_path: Path
) -> None:
    """The second operator takes over once the first one's Deployment, whose pod never runs here, is deleted."""
    sleeping_operator.stop()

    def operator(name: str) -> Operator:
        policy = tmp_path / f"{name}.yaml"  # as the charts do: each admits the pods of its own release
        policy.write_text(json.dumps({"networkPolicyFrom": [{"podSelector": {"matchLabels": {"release": name}}}]}))
        lease = ("--leader-elect", f"--lease-name={name}", f"--operator-namespace={ns}")
        options = (f"--namespace={ns}", f"--policy={policy}", "--resync-seconds=1")
        return Operator(kube.kubeconfig, tmp_path / name, *options, *lease)

    def serving() -> str:
        return str(kube.deployment(ns, "demo")["metadata"]["annotations"].get("stoker.dev/operator"))

    labels = {"app.kubernetes.io/name": "stoker-operator"}
    container = {"name": "operator", "image": "none"}
    pods = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    spec = {"selector": {"matchLabels": labels}, "template": pods}
    kube.apps.create_namespaced_deployment(ns, {"metadata": {"name": "first", "labels": labels}, "spec": spec})
    with operator("first") as first:
        kube.create(ns, document())
        eventually(lambda: serving() == f"{ns}/first", "the first one serves it")
        with operator("second") as second:
            eventually(lambda: "also watches this namespace" in second.log.read_text(), "the second one says so")
            quiet(kube, ns, second, eventually)
            kube.create(ns, document("raced"))  # both see it at the same time
            quiet(kube, ns, second, eventually)
            assert serving() == f"{ns}/first"
            first.stop()
            kube.apps.delete_namespaced_deployment("first", ns)
            eventually(lambda: serving() == f"{ns}/second", "the second one takes over")
            quiet(kube, ns, second, eventually)


def quiet(kube: Any, ns: str, operator: Operator, eventually: Any) -> None:
    """Wait until an endpoint's objects are no longer written, over several reconciles of an operator."""

    def written() -> dict[str, int]:
        return {kind: count for kind, count in kube.writes(ns).items() if kind not in ("leases", "replicasets", "pods")}

    def rests() -> bool:
        before, looks = written(), operator.reconciles()
        eventually(lambda: operator.reconciles() >= looks + 3, "it has looked")
        return written() == before

    eventually(rests, "nothing is written")
