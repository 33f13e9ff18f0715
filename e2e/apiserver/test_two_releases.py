"""Two releases of the chart in one cluster, and a release that moves to another namespace."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes import client

from .conftest import GROUP, PLURAL, SYSTEM
from .test_chart import CHART

CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


class Helm:
    """Helm, as an administrator of the cluster runs it."""

    def __init__(self, program: str, kube: Any) -> None:
        self.program = program
        self.environment = {**os.environ, "KUBECONFIG": str(kube.kubeconfig)}

    def __call__(self, *words: str) -> str:
        """What it says; of a failure what it says of that."""
        command = [self.program, *words]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return done.stderr if done.returncode else done.stdout

    def install(self, release: str, namespace: str, values: str, *options: str) -> str:
        """Installs the chart without what is there once for all releases."""
        values = f"crds.install=false,rbac.aggregate=false,{values}"
        return self("install", release, str(CHART), f"--namespace={namespace}", f"--set={values}", *options)


@pytest.fixture
def run_helm(kube: Any, helm: str, ns: str) -> Iterator[Helm]:
    """Helm; releases of the test's namespace are uninstalled at the end."""
    run = Helm(helm, kube)
    yield run
    for release in run("list", "--short", f"--namespace={ns}").split():
        run("uninstall", release, f"--namespace={ns}")


@pytest.fixture
def watch(kube: Any) -> Iterator[Callable[[list[str]], None]]:
    """Has the webhook of the fixture's release look after these namespaces until the end of the test."""
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


def test_an_install_over_namespaces_of_another_release_is_refused(
    kube: Any, run_helm: Helm, watch: Callable[[list[str]], None], ns: str
) -> None:
    there = f"release stoker in namespace {SYSTEM} looks after "
    dry = "--dry-run=server"
    assert f"{there}all namespaces already" in run_helm.install("second", ns, "webhook.enabled=true", dry)
    assert f"{there}{ns} already" in run_helm.install("second", ns, f"watchNamespaces={{{ns}}}", dry)
    assert there not in run_helm.install("second", ns, "webhook.enabled=false", dry)
    watch(["one", "two"])
    assert f"{there}one, two already" in run_helm.install("second", ns, "webhook.enabled=true", dry)
    assert f"{there}two already" in run_helm.install("second", ns, "watchNamespaces={three,two}", dry)
    assert "STATUS: pending-install" in run_helm.install("second", ns, "watchNamespaces={three}", dry)
    # Its own webhook is in no release's way.
    watch([ns])
    again = run_helm("upgrade", "--install", "stoker", str(CHART), f"--namespace={SYSTEM}", dry)
    assert "STATUS: pending-upgrade" in again


def test_a_release_may_move_to_another_namespace(kube: Any, run_helm: Helm, ns: str) -> None:
    """As docs/operations.md has it: the definition stayed, and says of which release it is."""
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
