"""Lifecycle of the chart: installation, upgrade, rollback, uninstallation; typos in values are errors.

Asserted: after an upgrade, a rollback and an uninstallation, only the CRD and its objects remain, the first release's
manifest still applies, and its endpoint's Deployment was not replaced. `helm test` succeeds, and the example values
start a model that answers.
"""

from __future__ import annotations

import json

import pytest
from kit import chart as release
from kit.chart import CHART, RELEASE, SYSTEM
from kit.cluster import Cluster, Images, Object
from kit.endpoint import Endpoint
from kit.waiting import wait_for

#: Example of the first release, with all fields that it had.
FIRST_RELEASE: Object = {
    "apiVersion": "stoker.dev/v1alpha1",
    "kind": "InferenceEndpoint",
    "metadata": {"name": "first"},
    "spec": {
        "model": {"source": "demo://gemma-3-270m", "servedNames": ["demo"]},
        "replicas": 0,
        "hardware": {"accelerator": "cpu", "count": 1, "resources": {"limits": {"memory": "4Gi"}}},
        "parallelism": {"tensor": 1, "data": 1},
        "engine": {"dtype": "float32", "maxNumSeqs": 4, "args": [], "env": [{"name": "A", "value": "b"}]},
        "service": {"port": 8000},
        "rollout": {"maxSurge": 1, "maxUnavailable": 0},
    },
}


#: Prints a page; asks again for a minute or longer, because a node's rules for a Service may lag behind the status.
ASK = """
import time, urllib.request
for attempt in range(60):
    try:
        print(urllib.request.urlopen({url!r}, timeout=10).read().decode())
        break
    except OSError:
        if attempt == 59:
            raise
        time.sleep(1)
"""


def test_typo_in_values_is_an_error(cluster: Cluster) -> None:
    output = cluster.helm("template", RELEASE, str(CHART), "--set", "replica=3", check=False)
    assert "replica" in output and "rror" in output


def test_helm_test_reports_a_working_webhook(cluster: Cluster, chart: None) -> None:
    output = cluster.helm("test", RELEASE, "--namespace", SYSTEM, "--logs", "--timeout", "2m")
    assert "refuses one whose hardware is not in the catalogue" in output


@pytest.mark.timeout(600)
def test_model_is_installed_with_the_chart(cluster: Cluster, images: Images, chart: None, namespace: str) -> None:
    example = CHART / "examples/demo-model.yaml"
    release.install(cluster, images, f"endpoints.demo.namespace={namespace}", values_files=[example])
    endpoint = Endpoint(cluster, namespace)
    url = endpoint.wait_ready()["url"] + "/models"
    (pod,) = endpoint.pods()
    output = endpoint.run(pod["metadata"]["name"], ASK.format(url=url))
    assert json.loads(output)["data"][0]["id"] == "gemma-3-270m"
    release.install(cluster, images)  # without the values: the model does not belong to the release
    assert endpoint.ready()


@pytest.mark.timeout(600)
def test_install_upgrade_rollback_uninstall(cluster: Cluster, images: Images, chart: None, namespace: str) -> None:
    endpoint = Endpoint(cluster, namespace, "first")
    endpoint.apply(FIRST_RELEASE)
    assert endpoint.wait_reason("ScaledToZero", status="True")
    uid = cluster.get("deployment", "first", "--namespace", namespace)["metadata"]["uid"]
    revision = len(history(cluster))

    release.install(cluster, images, "logLevel=debug", "replicas=1")
    cluster.helm("rollback", RELEASE, str(revision), "--namespace", SYSTEM, "--wait", "--timeout", "3m")
    assert len(history(cluster)) == revision + 2
    deployment = cluster.get("deployment", RELEASE, "--namespace", SYSTEM)
    assert deployment["status"]["readyReplicas"] == 2
    assert "--log-level=info" in deployment["spec"]["template"]["spec"]["containers"][0]["args"]

    release.uninstall(cluster)
    try:
        wait_for(lambda: not leftovers(cluster), "nothing of the release is left", 90)
        assert cluster.find("crd", "inferenceendpoints.stoker.dev")
        assert cluster.get("deployment", "first", "--namespace", namespace)["metadata"]["uid"] == uid
        assert endpoint.get()["status"]["conditions"]
        endpoint.apply(FIRST_RELEASE | {"spec": FIRST_RELEASE["spec"] | {"replicas": 0, "service": {"port": 8001}}})
    finally:
        release.install(cluster, images)
    wait_for(
        lambda: cluster.get("service", "first", "--namespace", namespace)["spec"]["ports"][0]["port"] == 8001,
        "the change without an operator is applied",
        60,
    )


def history(cluster: Cluster) -> list[Object]:
    """Return the release's revisions."""
    revisions: list[Object] = json.loads(cluster.helm("history", RELEASE, "--namespace", SYSTEM, "-o", "json"))
    return revisions


def leftovers(cluster: Cluster) -> str:
    """Return the release's objects in its namespace."""
    kinds = "all,secrets,configmaps,poddisruptionbudgets,roles,rolebindings"
    selector = ("-l", f"app.kubernetes.io/instance={RELEASE}", "-o", "name")
    return cluster.kubectl("get", kinds, "--namespace", SYSTEM, *selector, check=False).replace(
        "No resources found", ""
    )
