"""The objects an endpoint becomes: as golden files, and what must hold of all of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker_operator.cli.render import main, render
from stoker_operator.plan.catalogue import Catalogue

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_render_as_before(example: Path, capsys: Any) -> None:
    """A difference here restarts every user's pods when they upgrade. Where that is meant: STOKER_GOLDEN=write."""
    assert main(["-f", str(example)]) == 0
    rendered = capsys.readouterr().out
    golden = GOLDEN / example.name
    if os.environ.get("STOKER_GOLDEN") == "write":
        golden.write_text(rendered)
    assert rendered == golden.read_text()


def rendered(endpoint: Any, kind: str, **spec: Any) -> dict[str, Any]:
    objects = render(endpoint(**spec), Catalogue.load())
    found: dict[str, Any] = next(each for each in objects if each["kind"] == kind)
    return found


def pod(endpoint: Any, **spec: Any) -> dict[str, Any]:
    found: dict[str, Any] = rendered(endpoint, "Deployment", **spec)["spec"]["template"]["spec"]
    return found


def test_pods_obey_the_restricted_standard(endpoint: Any) -> None:
    spec = pod(endpoint)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    (container,) = spec["containers"]
    assert container["name"] == "engine"
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert all(set(volume) <= {"name", "emptyDir", "configMap", "persistentVolumeClaim"} for volume in spec["volumes"])


def test_whatever_is_written_goes_to_a_volume(endpoint: Any) -> None:
    container = pod(endpoint)["containers"][0]
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/cache", "/tmp"}
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    assert all(env[name].startswith("/cache") for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"))


def test_the_service_reaches_the_pods(endpoint: Any) -> None:
    service = rendered(endpoint, "Service", service={"port": 80, "type": "NodePort", "annotations": {"a": "b"}})
    deployment = rendered(endpoint, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    ports = deployment["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert service["spec"]["ports"][0]["targetPort"] == ports[0]["name"]
    assert (service["spec"]["type"], service["spec"]["ports"][0]["port"]) == ("NodePort", 80)
    assert service["metadata"]["annotations"] == {"a": "b"}


def test_a_claim_is_mounted_where_the_engine_looks(endpoint: Any) -> None:
    spec = pod(
        endpoint,
        model={"source": "pvc://weights/llama"},
        storage={"cache": {"persistentVolumeClaim": {"claimName": "cache"}}},
    )
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["model"]["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}
    assert volumes["cache"]["persistentVolumeClaim"] == {"claimName": "cache"}
    mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    assert spec["containers"][0]["args"][1].startswith(mounts["model"] + "/")


def test_a_template_in_a_config_map_is_mounted_where_the_engine_looks(endpoint: Any) -> None:
    ref = {"configMapKeyRef": {"name": "templates", "key": "mine"}}
    spec = pod(endpoint, model={"source": "file:///m", "chatTemplate": ref})
    (mount,) = [mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == "chat-template"]
    (volume,) = [volume for volume in spec["volumes"] if volume["name"] == "chat-template"]
    path = volume["configMap"]["items"][0]["path"]
    assert f"--chat-template={mount['mountPath']}/{path}" in spec["containers"][0]["args"]


def test_kubernetes_does_not_rewrite_a_template(endpoint: Any) -> None:
    spec = pod(endpoint, model={"source": "file:///m", "chatTemplate": {"value": "$(HOME) $ {{ x }}"}})
    assert "--chat-template=$$(HOME) $$ {{ x }}" in spec["containers"][0]["args"]


def test_the_users_environment_comes_last_and_wins(endpoint: Any) -> None:
    mine = [
        {"name": "HF_HOME", "value": "/elsewhere"},
        {"name": "EMPTY", "value": ""},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}},
    ]
    env = pod(endpoint, engine={"env": mine})["containers"][0]["env"]
    assert [variable["name"] for variable in env] == ["HOME", "XDG_CACHE_HOME", "HF_HOME", "EMPTY", "TOKEN"]
    assert env[2]["value"] == "/elsewhere"
    assert env[3] == {"name": "EMPTY"}
    assert env[4] == mine[2]


def test_accelerators_are_asked_for_by_their_resource(endpoint: Any) -> None:
    hardware = {"accelerator": "nvidia-l4", "count": 2, "resources": {"limits": {"cpu": 4}, "requests": {"cpu": "2"}}}
    spec = pod(endpoint, hardware=hardware, engine={"image": "x", "imagePullPolicy": "Always"})
    (container,) = spec["containers"]
    assert container["resources"] == {"limits": {"cpu": "4", "nvidia.com/gpu": "2"}, "requests": {"cpu": "2"}}
    assert container["imagePullPolicy"] == "Always"
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in spec["volumes"]


def test_the_demo_carries_the_template_that_is_shipped() -> None:
    manifest = yaml.safe_load((ROOT / "examples/01-demo.yaml").read_text())
    template = (ROOT / "examples/chat-template.jinja").read_text()
    assert manifest["spec"]["model"]["chatTemplate"]["value"] == template
