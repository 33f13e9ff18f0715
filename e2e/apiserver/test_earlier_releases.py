"""Upgrades from earlier releases: their CRD is replaced while objects are stored, their manifests still apply, and the
pods of their operator keep running.

`first_release/` contains what the first release installed, accepted and created, verbatim; `second_release/` the same
of the release that stored a record of the rendered spec under the hash of the spec's text. The last release is the
newest tag; its operator runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from apiserver import ApiServer
from kubernetes import client, config

from stoker_operator.api.v1alpha1.crd import crd
from stoker_operator.cluster.kube import Kube, KubeError

from . import last_release
from .cluster_client import wait_for
from .operator_process import Operator

ENDPOINTS = ("stoker.dev", "v1alpha1", "default", "inferenceendpoints")


@pytest.fixture(params=["first_release", "second_release", "last_release"])
def release(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a release: definition.yaml, endpoint.yaml, and objects.yaml or the sources of its operator."""
    recorded = Path(__file__).with_name(request.param)
    if recorded.is_dir():
        return recorded
    folder = last_release.export(tmp_path / "last_release")
    (folder / "definition.yaml").symlink_to(folder / "crds/inferenceendpoints.stoker.dev.yaml")
    (folder / "endpoint.yaml").symlink_to(Path(__file__).with_name("second_release") / "endpoint.yaml")
    return folder


@pytest.fixture
def before(release: Path, tmp_path: Path) -> Iterator[ApiServer]:
    """A cluster with an endpoint of that release, as its operator left it, without a running operator."""
    with ApiServer() as server:
        api: Any = config.new_client_from_config(str(server.kubeconfig))
        client.ApiextensionsV1Api(api).create_custom_resource_definition(read(release / "definition.yaml")[0])
        kube = Kube(api)
        (manifest,) = read(release / "endpoint.yaml")
        manifest["metadata"]["namespace"] = "default"
        endpoint = settled(lambda: kube.apply(manifest, "kubectl"))
        apps: Any = client.AppsV1Api(api)

        def rolled_out() -> bool:
            deployed = apps.read_namespaced_deployment(manifest["metadata"]["name"], "default")
            seen = deployed.status.observed_generation == deployed.metadata.generation
            return seen and len(apps.list_namespaced_replica_set("default").items) == 1

        if (release / "objects.yaml").exists():
            recreate(kube, endpoint, read(release / "objects.yaml"))
            wait_for(rolled_out, "its Deployment has a ReplicaSet")
        else:
            operator = Operator(server.kubeconfig, tmp_path / "earlier_log")
            operator.environment["PYTHONPATH"] = last_release.python_path(release)
            with operator:
                wait_for(rolled_out, "its Deployment has a ReplicaSet")
        yield server


def recreate(kube: Kube, endpoint: Any, objects: list[Any]) -> None:
    """Apply the recorded objects of an endpoint, and a status, as an earlier operator did."""
    owner = {
        "apiVersion": endpoint["apiVersion"],
        "kind": endpoint["kind"],
        "name": endpoint["metadata"]["name"],
        "uid": endpoint["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    for made in objects:
        made["metadata"] |= {"namespace": "default", "ownerReferences": [owner]}
        kube.apply(made, "stoker")
    status = {"observedGeneration": 1, "replicas": 1}
    kept = ("apiVersion", "kind")
    metadata = {"name": endpoint["metadata"]["name"], "namespace": "default"}
    kube.apply({name: endpoint[name] for name in kept} | {"metadata": metadata, "status": status}, "stoker", "status")


def read(file: Path) -> list[Any]:
    """Return the documents of a file."""
    return list(yaml.safe_load_all(file.read_text()))


def settled(attempt: Callable[[], Any]) -> Any:
    """Return the result of `attempt`, once the definition is served."""

    def look() -> Any:
        try:
            return attempt()
        except KubeError as error:
            if error.status not in (404, 503):
                raise
            return None

    return wait_for(look, "the definition is served")


def test_an_upgrade_restarts_nothing(before: ApiServer, release: Path, tmp_path: Path, eventually: Any) -> None:
    api: Any = config.new_client_from_config(str(before.kubeconfig))
    apps: Any = client.AppsV1Api(api)
    custom: Any = client.CustomObjectsApi(api)
    name = read(release / "endpoint.yaml")[0]["metadata"]["name"]
    deployed = apps.read_namespaced_deployment(name, "default")

    # The definition is replaced; stored objects remain readable and writable.
    definition = copy.deepcopy(crd())
    live: Any = client.ApiextensionsV1Api(api).read_custom_resource_definition(definition["metadata"]["name"])
    definition["metadata"]["resourceVersion"] = live.metadata.resource_version
    client.ApiextensionsV1Api(api).replace_custom_resource_definition(definition["metadata"]["name"], definition)
    assert custom.get_namespaced_custom_object(*ENDPOINTS, name)["spec"] == read(release / "endpoint.yaml")[0][
        "spec"
    ] | {"replicas": 1}
    (manifest,) = read(release / "endpoint.yaml")
    manifest["metadata"]["namespace"] = "default"
    Kube(api).apply(manifest, "kubectl")

    with Operator(before.kubeconfig, tmp_path / "log") as operator:
        eventually(lambda: operator.reconciles() >= 1, "the new operator has evaluated the endpoint")

        # The new operator creates its own objects and conditions.
        policies: Any = client.NetworkingV1Api(api)

        def closed() -> bool:
            """Return whether the NetworkPolicy restricts access; an earlier release admitted all or had no policy."""
            (policy,) = policies.list_namespaced_network_policy("default").items or (None,)
            return policy is not None and bool(policy.spec.ingress[0]._from)

        eventually(closed, "the new operator works")
        conditions = eventually(
            lambda: custom.get_namespaced_custom_object(*ENDPOINTS, name)["status"].get("conditions"), "and reports"
        )
        assert {each["type"] for each in conditions} >= {"Stalled", "Ready"}
        after = apps.read_namespaced_deployment(name, "default")
        assert after.spec.template.to_dict() == deployed.spec.template.to_dict()
        assert len(apps.list_namespaced_replica_set("default").items) == 1

        # With a changed spec it creates pods of its own form.
        change = {"spec": {"engine": {"maxNumSeqs": 5}}}
        merge = {"_content_type": "application/merge-patch+json"}
        custom.patch_namespaced_custom_object(*ENDPOINTS, name, change, **merge)
        eventually(lambda: len(apps.list_namespaced_replica_set("default").items) == 2, "a new template")
