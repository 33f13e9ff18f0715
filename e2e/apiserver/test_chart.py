"""The chart: what it installs, and what its values may be. That it installs is shown by every test beside this one."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker_operator.plan.catalogue import Catalogue

CHART = Path(__file__).parents[2] / "charts/stoker"


def template(helm: str, *values: str) -> list[dict[str, Any]]:
    command = [helm, "template", "stoker", CHART, *(f"--set={value}" for value in values)]
    rendered = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [document for document in yaml.safe_load_all(rendered) if document]


def only(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


def test_it_is_clean(helm: str) -> None:
    subprocess.run([helm, "lint", "--strict", "--quiet", CHART], check=True)


def test_the_operator_may_do_what_it_does_and_no_more(helm: str) -> None:
    rules = only(template(helm), "ClusterRole")["rules"]
    assert not [rule for rule in rules for word in (*rule["verbs"], *rule["resources"]) if "*" in word]
    granted = {f"{resource} {verb}" for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    assert not [grant for grant in granted if grant.endswith(" delete") or grant.startswith("secrets")]
    assert "inferenceendpoints patch" not in granted  # users' objects are theirs


def test_its_pod_is_restricted(helm: str) -> None:
    spec = only(template(helm), "Deployment")["spec"]["template"]["spec"]
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_images_and_accelerators_reach_the_operator(helm: str, tmp_path: Path) -> None:
    documents = template(
        helm, "images.operator=my/operator:1", "images.engine.cuda=my/cuda:2", "accelerators.my-gpu.images=cuda"
    )
    file = tmp_path / "catalogue.yaml"
    file.write_text(only(documents, "ConfigMap")["data"]["catalogue.yaml"])
    catalogue = Catalogue.load(file)
    assert catalogue.image("stoker", "my-gpu") == catalogue.image("stoker", "nvidia-l4") == "my/cuda:2"
    assert catalogue.image("stoker", "cpu") == Catalogue.load().image("stoker", "cpu")
    (container,) = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "my/operator:1"


def test_rights_end_where_the_namespaces_do(helm: str) -> None:
    documents = template(helm, "namespaces={one,two}")
    assert not [document for document in documents if document["kind"] == "ClusterRoleBinding"]
    bindings = [document for document in documents if document["kind"] == "RoleBinding"]
    assert [binding["metadata"]["namespace"] for binding in bindings] == ["one", "two"]
    (container,) = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert {"--namespace=one", "--namespace=two"} <= set(container["args"])


@pytest.mark.parametrize("value", ["nonsense=1", "images.operater=x", "logLevel=loud", "accelerators.a.memory=1"])
def test_a_wrong_value_is_refused(helm: str, value: str) -> None:
    command = [helm, "template", "stoker", CHART, "--set", value]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0
    assert "values don't meet the specifications of the schema" in result.stderr
