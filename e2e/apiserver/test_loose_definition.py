"""Invalid endpoints that the API server accepted because its definition has no schema, as with another version's CRD or
one that was relaxed by hand.

The operator reports each with the name of the field, creates nothing for it, and does not fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from apiserver import ApiServer
from kubernetes import client, config

from stoker_operator.api.v1alpha1.crd import crd

sys.path.insert(0, str(Path(__file__).parents[2]))

from kit.waiting import wait_for
from tests.operator.api.rule_breakers import RULE_BREAKERS
from tests.operator.api.schema_faults import generated

WRONG = (
    *RULE_BREAKERS,
    *generated(crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]),
)
ENDPOINTS = ("stoker.dev", "v1alpha1", "default", "inferenceendpoints")


@pytest.fixture
def loose() -> Iterator[ApiServer]:
    """An API server that accepts any spec."""
    definition = crd()
    version = definition["spec"]["versions"][0]
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version["schema"]["openAPIV3Schema"]["properties"]["spec"] = anything
    del version["subresources"]["scale"]  # the scale subresource requires a number of replicas
    with ApiServer(controller_manager=False) as server:
        api = config.new_client_from_config(str(server.kubeconfig))
        client.ApiextensionsV1Api(api).create_custom_resource_definition(definition)
        yield server


@pytest.mark.further
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thousand_wrong_endpoints_are_reported(loose: ApiServer, tmp_path: Path) -> None:
    api = config.new_client_from_config(str(loose.kubeconfig))
    custom = client.CustomObjectsApi(api)
    bodies = [
        {
            "apiVersion": "stoker.dev/v1alpha1",
            "kind": "InferenceEndpoint",
            "metadata": {"name": f"wrong-{number}"},
            "spec": wrong.spec,
        }
        for number, wrong in enumerate(WRONG)
    ]
    _created(custom, bodies[0])
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda body: _created(custom, body), bodies[1:]))
    log = tmp_path / "log"
    command = [sys.executable, "-m", "stoker", "operator", "--health-address=127.0.0.1:0"]
    with log.open("wb") as log_file:
        environment = {**os.environ, "KUBECONFIG": str(loose.kubeconfig)}
        operator = subprocess.Popen(command, env=environment, stdout=log_file, stderr=log_file)
    try:
        verdicts = wait_for(lambda: _verdicts(custom), f"all of {len(WRONG)} are reported", 600, every=3)
    finally:
        operator.terminate()
        operator.wait(timeout=120)
    for number, wrong in enumerate(WRONG):
        status, message = verdicts[f"wrong-{number}"]
        assert status == "False", wrong.name
        assert wrong.field in message, wrong.name
    assert "Traceback" not in log.read_text()
    assert not client.AppsV1Api(api).list_deployment_for_all_namespaces().items
    assert not client.CoreV1Api(api).list_persistent_volume_claim_for_all_namespaces().items


def _created(custom: Any, body: Any) -> None:
    """Create the endpoint, as soon as the new resource is served."""

    def created() -> bool:
        try:
            custom.create_namespaced_custom_object(*ENDPOINTS, body)
        except client.ApiException as error:
            if error.status != 404:
                raise
            return False
        return True

    wait_for(created, "endpoints are served", 120, every=0.1)


def _verdicts(custom: Any) -> dict[str, tuple[str, str]] | None:
    """Return status and message of the Accepted condition of all endpoints, or None while one has none."""
    found = {}
    for item in custom.list_namespaced_custom_object(*ENDPOINTS)["items"]:
        for condition in item.get("status", {}).get("conditions", ()):
            if condition["type"] == "Accepted":
                found[item["metadata"]["name"]] = (condition["status"], condition["message"])
    return found if len(found) == len(WRONG) else None
