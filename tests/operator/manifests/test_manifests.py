"""The objects of an endpoint: golden files, and properties of all of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker_operator.api.violation import Refused
from stoker_operator.cli.render import main, render
from stoker_operator.manifests.children import children
from stoker_operator.manifests.node_affinity import node_affinity
from stoker_operator.manifests.service import url
from stoker_operator.manifests.storage import sharing_problem
from stoker_operator.objects.owner import Owner
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.planner import plan
from stoker_operator.policy.policy import Policy

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parent / "golden"
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_render_as_before(example: Path, capsys: Any) -> None:
    """A difference here restarts every user's pods on upgrade. If it is intended: STOKER_GOLDEN=write."""
    assert main(["-f", str(example)]) == 0
    rendered = capsys.readouterr().out
    golden = GOLDEN / example.name
    if os.environ.get("STOKER_GOLDEN") == "write":
        golden.write_text(rendered)
    assert rendered == golden.read_text()


def objects(endpoint: Any, **spec: Any) -> dict[str, Any]:
    """Return the objects by kind, in a cluster with PodMonitors."""
    found = {each["kind"]: each for each in render(endpoint(**spec), Catalogue.load(), pod_monitors=True)}
    assert {each["metadata"]["name"] for each in found.values()} == {"demo"}
    return found


def rendered(endpoint: Any, kind: str, **spec: Any) -> dict[str, Any]:
    found: dict[str, Any] = objects(endpoint, **spec)[kind]
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


VLLM = {"model": {"source": "hf://org/name"}, "engine": {"runtime": "vllm", "image": "v"}}
GPU = {"accelerator": "nvidia-l4", "count": 2}


def test_image_that_runs_as_root_gets_a_user(endpoint: Any) -> None:
    spec = pod(endpoint, **VLLM, hardware=GPU)
    assert spec["securityContext"]["runAsUser"] > 0
    container = spec["containers"][0]
    assert container["command"] == ["vllm"]
    assert container["args"][:2] == ["serve", "org/name"]
    # torch looks up the name of a user that no password file contains.
    assert {"name": "USER", "value": "vllm"} in container["env"]


def test_pods_are_scheduled_on_nodes_with_their_accelerator(endpoint: Any) -> None:
    accelerator = Catalogue.load().accelerator("nvidia-l4")
    spec = pod(endpoint, hardware=GPU, engine={"image": "x"})
    assert spec["tolerations"] == [
        each.model_dump(by_alias=True, exclude_none=True) for each in accelerator.tolerations
    ]
    assert spec["affinity"] == node_affinity(accelerator.node_labels)
    assert "affinity" not in pod(endpoint)
    more = {"key": "team", "operator": "Exists"}
    user_affinity = pod(endpoint, hardware=GPU, engine={"image": "x"}, template={"spec": {"tolerations": [more]}})
    assert user_affinity["tolerations"] == [*spec["tolerations"], more]


def test_termination_grace_period_covers_the_drain(endpoint: Any) -> None:
    spec = pod(endpoint, rollout={"drainSeconds": 120})
    assert spec["terminationGracePeriodSeconds"] == 5 + 120 + 5
    assert "--shutdown-timeout=120" in spec["containers"][0]["args"]
    assert "lifecycle" not in spec["containers"][0]
    assert pod(endpoint)["terminationGracePeriodSeconds"] == 5 + 30 + 5
    assert pod(endpoint, engine={"args": ["--shutdown-grace=9.5"]})["terminationGracePeriodSeconds"] == 10 + 30 + 5


def test_pre_stop_hook_waits_for_engines_that_do_not_drain(endpoint: Any) -> None:
    spec = pod(endpoint, **VLLM, hardware=GPU, rollout={"drainSeconds": 120})
    assert spec["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 125}}}
    assert spec["terminationGracePeriodSeconds"] == 130


def test_rollout_settings_reach_the_deployment(endpoint: Any) -> None:
    rollout = {"maxSurge": "25%", "maxUnavailable": 2, "startupTimeoutSeconds": 600}
    deployment = rendered(endpoint, "Deployment", rollout=rollout)["spec"]
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": "25%", "maxUnavailable": 2}
    assert deployment["progressDeadlineSeconds"] == 600
    assert rendered(endpoint, "Deployment")["spec"]["progressDeadlineSeconds"] == 3600


def test_single_pod_has_no_disruption_budget(endpoint: Any) -> None:
    assert "PodDisruptionBudget" not in objects(endpoint)
    assert "PodDisruptionBudget" not in objects(endpoint, replicas=0)
    budget = rendered(endpoint, "PodDisruptionBudget", replicas=2)["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"  # a pod that does not start blocks no drain
    assert budget["selector"] == rendered(endpoint, "Deployment")["spec"]["selector"]


def test_policy_decides_how_endpoints_are_scraped(endpoint: Any) -> None:
    def monitor(chart_policy: dict[str, Any], **spec: Any) -> Any:
        policy = Policy.model_validate(chart_policy)
        objects = render(endpoint(**spec), Catalogue.load(), True, policy)
        return next((each for each in objects if each["kind"] == "PodMonitor"), None)

    ours = monitor({})["metadata"]["labels"]
    labels = {"release": "kube-prometheus-stack", "app.kubernetes.io/instance": "not-mine-to-set"}
    assert monitor({"podMonitorLabels": labels})["metadata"]["labels"] == {"release": "kube-prometheus-stack", **ours}
    assert monitor({"podMonitors": False}) is None
    assert monitor({"podMonitors": False}, monitoring={"podMonitor": "Enabled"})["metadata"]["labels"] == ours


def test_pod_monitor_is_rendered_if_the_cluster_has_the_kind(endpoint: Any) -> None:
    monitor = rendered(endpoint, "PodMonitor")["spec"]
    assert monitor["podMetricsEndpoints"] == [{"port": "http", "path": "/metrics"}]
    assert monitor["selector"] == rendered(endpoint, "Deployment")["spec"]["selector"]
    assert "PodMonitor" not in objects(endpoint, monitoring={"podMonitor": "Disabled"})
    plain = render(endpoint(), Catalogue.load())
    assert "PodMonitor" not in {each["kind"] for each in plain}
    spec = endpoint(monitoring={"podMonitor": "Enabled"}).spec
    with pytest.raises(
        Refused, match=r"^spec\.monitoring\.podMonitor: this cluster does not have the kind PodMonitor; install"
    ):
        children(Owner("demo"), spec, plan(spec, Catalogue.load()))


def test_https_engine_gets_https_probes_and_url(endpoint: Any) -> None:
    args = {"args": ["--ssl-certfile=/tls/tls.crt", "--ssl-keyfile=/tls/tls.key"]}
    container = pod(endpoint, engine=args)["containers"][0]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
        assert "scheme" not in pod(endpoint)["containers"][0][probe]["httpGet"]
    assert rendered(endpoint, "PodMonitor", engine=args)["spec"]["podMetricsEndpoints"][0]["scheme"] == "https"
    owner = Owner("demo", "team")
    assert url(owner, endpoint(engine=args).spec) == "https://demo.team.svc:8000/v1"
    assert url(owner, endpoint(service={"port": 80}).spec) == "http://demo.team.svc:80/v1"
    assert url(owner, endpoint(engine={"runtime": "unheard-of"}).spec) == "http://demo.team.svc:8000/v1"


def test_api_keys_are_mounted_where_the_engine_reads_them(endpoint: Any) -> None:
    spec = pod(endpoint, auth={"apiKeysSecretRef": {"name": "clients"}})
    (volume,) = [volume for volume in spec["volumes"] if "secret" in volume]
    assert volume["secret"] == {"secretName": "clients", "defaultMode": 0o440}
    (mount,) = [mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == volume["name"]]
    assert mount["readOnly"] is True
    assert f"--api-key-file={mount['mountPath']}" in spec["containers"][0]["args"]


def test_an_engine_without_key_files_gets_one_key(endpoint: Any) -> None:
    spec = pod(endpoint, **VLLM, hardware=GPU, auth={"apiKeysSecretRef": {"name": "clients"}})
    assert not [volume for volume in spec["volumes"] if "secret" in volume]
    key = {"secretKeyRef": {"name": "clients", "key": "api-key"}}
    assert {"name": "VLLM_API_KEY", "valueFrom": key} in spec["containers"][0]["env"]


def test_hub_token_comes_from_a_secret(endpoint: Any) -> None:
    model = {"source": "hf://org/name", "tokenSecretRef": {"name": "hub", "key": "token"}}
    env = pod(endpoint, model=model)["containers"][0]["env"]
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}} in env
    with pytest.raises(Refused, match=r"^spec\.engine\.env: spec\.model\.tokenSecretRef already sets HF_TOKEN"):
        pod(endpoint, model=model, engine={"env": [{"name": "HF_TOKEN", "value": "x"}]})


def test_claim_is_rendered_from_its_template(endpoint: Any) -> None:
    template = {
        "metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": 10}}, "storageClassName": ""},
    }
    storage = {"cache": {"volumeClaimTemplate": template}}
    claim = rendered(endpoint, "PersistentVolumeClaim", storage=storage)
    assert claim["metadata"]["labels"]["a"] == "b"
    assert claim["metadata"]["annotations"] == {"c": "d"}
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "10"}},
        "storageClassName": "",
    }
    volumes = {volume["name"]: volume for volume in pod(endpoint, storage=storage)["volumes"]}
    assert volumes["cache"]["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}


@pytest.mark.parametrize(
    ("spec", "modes", "shared"),
    [
        ({}, ["ReadWriteOnce"], False),
        ({}, ["ReadWriteOnce", "ReadWriteMany"], True),
        ({"replicas": 2, "rollout": {"maxSurge": 0, "maxUnavailable": 1}}, ["ReadWriteOnce"], False),
        ({"rollout": {"maxSurge": 0, "maxUnavailable": 1}}, ["ReadWriteOncePod"], True),
        ({"rollout": {"maxSurge": "0%", "maxUnavailable": 1}}, ["ReadWriteOncePod"], True),
        ({"rollout": {"maxSurge": "10%"}}, [], False),
    ],
)
def test_pods_that_cannot_share_a_claim_are_refused(endpoint: Any, spec: Any, modes: list[str], shared: bool) -> None:
    cache = {"storage": {"cache": {"persistentVolumeClaim": {"claimName": "mine"}}}}
    model = {"model": {"source": "pvc://mine/folder"}}
    for named, field in ((cache, "spec.storage.cache.persistentVolumeClaim"), (model, "spec.model.source")):
        problem = sharing_problem(endpoint(**named, **spec).spec, {"mine": modes})
        assert (problem is None) == shared
        if problem:
            assert str(problem).startswith(f"{field}: claim mine allows ")
        assert sharing_problem(endpoint(**named, **spec).spec, {}) is None  # the claim does not exist yet: pods wait
    assert sharing_problem(endpoint(**spec).spec, {"mine": modes}) is None


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ({}, ", or replicas 1 with rollout maxSurge 0 and maxUnavailable 1"),
        (
            {"scaling": {"maxReplicas": 2, "target": 4}},
            ", or scaling.maxReplicas 1 with rollout maxSurge 0 and maxUnavailable 1",
        ),
        ({"hardware": {"accelerator": "nvidia-l4", "nodes": 2}, "parallelism": {"pipeline": 2}}, ""),
    ],
    ids=["replicas", "scaling", "nodes"],
)
def test_remedy_for_a_claim_that_pods_cannot_share_leads_to_one_pod(endpoint: Any, spec: Any, remedy: str) -> None:
    cache = {"storage": {"cache": {"persistentVolumeClaim": {"claimName": "mine"}}}}
    problem = sharing_problem(endpoint(**cache, **spec).spec, {"mine": ["ReadWriteOnce"]})
    assert problem and problem.remedy == f"use a claim that allows ReadWriteMany{remedy}"


def test_read_only_claim_may_be_shared_by_readers(endpoint: Any) -> None:
    modes = {"mine": ["ReadOnlyMany"]}
    assert sharing_problem(endpoint(replicas=2, model={"source": "pvc://mine"}).spec, modes) is None
    cache = {"cache": {"persistentVolumeClaim": {"claimName": "mine"}}}
    problem = sharing_problem(endpoint(replicas=2, model={"source": "pvc://mine"}, storage=cache).spec, modes)
    assert problem and problem.field == "spec.storage.cache.persistentVolumeClaim"


def test_shared_memory_has_the_requested_size(endpoint: Any) -> None:
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}
    assert shm in pod(endpoint, storage={"shmSize": "1Gi"})["volumes"]
    assert "shm" not in {volume["name"] for volume in pod(endpoint)["volumes"]}
    vllm = pod(endpoint, model={"source": "hf://org/name"}, engine={"runtime": "vllm", "image": "x"})
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in vllm["volumes"]
    gpus = {"hardware": {"accelerator": "nvidia-l4", "count": 4}, "engine": {"image": "x"}}
    sizes = {name: {"tensor": tensor, "data": data} for name, tensor, data in (("split", 2, 2), ("copies", 1, 4))}
    split = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}
    assert split in pod(endpoint, **gpus, parallelism=sizes["split"])["volumes"]
    apart = [pod(endpoint, **gpus, parallelism=sizes["copies"]), pod(endpoint, parallelism=sizes["split"])]
    assert all("shm" not in {volume["name"] for volume in each["volumes"]} for each in apart)


def test_ranks_get_additional_time_to_terminate(endpoint: Any) -> None:
    one, four = pod(endpoint), pod(endpoint, parallelism={"tensor": 2, "data": 2})
    assert four["terminationGracePeriodSeconds"] == one["terminationGracePeriodSeconds"] + 5
    words = four["containers"][0]["args"]
    assert {"--tensor-parallel-size=2", "--data-parallel-size=2"} <= set(words)
    assert "nvidia.com/gpu" not in str(four["containers"][0].get("resources"))


def test_template_of_the_user_is_merged(endpoint: Any) -> None:
    template = {
        "metadata": {"labels": {"team": "search"}, "annotations": {"note": "x"}},
        "spec": {"nodeSelector": {"zone": "a"}, "imagePullSecrets": [{"name": "registry"}]},
    }
    made = rendered(endpoint, "Deployment", template=template)["spec"]["template"]
    plain = rendered(endpoint, "Deployment")["spec"]["template"]
    assert made["metadata"]["labels"] == {**plain["metadata"]["labels"], "team": "search"}
    assert made["metadata"]["annotations"] == {"note": "x"}
    assert made["spec"] == {**plain["spec"], **template["spec"]}


def test_device_claims_are_passed_on(endpoint: Any) -> None:
    hardware = {"accelerator": "cpu", "resources": {"claims": [{"name": "nic", "request": "fast"}]}}
    container = pod(endpoint, hardware=hardware)["containers"][0]
    assert container["resources"] == {"claims": [{"name": "nic", "request": "fast"}]}


def test_rendering_is_deterministic(endpoint: Any) -> None:
    once, second_rendering = (json.dumps(objects(endpoint, **VLLM, hardware=GPU)) for _ in range(2))
    assert once == second_rendering


def test_writable_paths_are_volumes(endpoint: Any) -> None:
    container = pod(endpoint)["containers"][0]
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/cache", "/tmp"}
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    assert all(env[name].startswith("/cache") for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"))


def test_the_service_reaches_the_pods(endpoint: Any) -> None:
    service = rendered(
        endpoint,
        "Service",
        networkPolicy={"mode": "Open"},
        service={"port": 80, "type": "NodePort", "annotations": {"a": "b"}, "labels": {"pool": "public"}},
    )
    deployment = rendered(endpoint, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    ports = deployment["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert service["spec"]["ports"][0]["targetPort"] == ports[0]["name"]
    assert (service["spec"]["type"], service["spec"]["ports"][0]["port"]) == ("NodePort", 80)
    assert service["metadata"]["annotations"] == {"a": "b"}
    assert service["metadata"]["labels"] == {"pool": "public", **rendered(endpoint, "Service")["metadata"]["labels"]}
    assert service["spec"]["selector"] == rendered(endpoint, "Service")["spec"]["selector"]


def test_claim_is_mounted_at_the_engines_model_path(endpoint: Any) -> None:
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


def test_chat_template_of_a_config_map_is_mounted_at_the_engines_path(endpoint: Any) -> None:
    ref = {"configMapKeyRef": {"name": "templates", "key": "mine"}}
    spec = pod(endpoint, model={"source": "file:///m", "chatTemplate": ref})
    (mount,) = [mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == "chat-template"]
    (volume,) = [volume for volume in spec["volumes"] if volume["name"] == "chat-template"]
    path = volume["configMap"]["items"][0]["path"]
    assert f"--chat-template={mount['mountPath']}/{path}" in spec["containers"][0]["args"]


def test_variables_in_a_chat_template_are_escaped(endpoint: Any) -> None:
    spec = pod(endpoint, model={"source": "file:///m", "chatTemplate": {"value": "$(HOME) $ {{ x }}"}})
    assert "--chat-template=$$(HOME) $$ {{ x }}" in spec["containers"][0]["args"]


def test_environment_of_the_user_comes_last_and_wins(endpoint: Any) -> None:
    user_env = [
        {"name": "HF_HOME", "value": "/elsewhere"},
        {"name": "EMPTY", "value": ""},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}},
    ]
    env = pod(endpoint, engine={"env": user_env})["containers"][0]["env"]
    assert [variable["name"] for variable in env] == ["HOME", "XDG_CACHE_HOME", "HF_HOME", "EMPTY", "TOKEN"]
    assert env[2]["value"] == "/elsewhere"
    assert env[3] == {"name": "EMPTY"}
    assert env[4] == user_env[2]


def test_accelerators_are_requested_by_their_resource(endpoint: Any) -> None:
    hardware = {"accelerator": "nvidia-l4", "count": 2, "resources": {"limits": {"cpu": 4}, "requests": {"cpu": "2"}}}
    spec = pod(endpoint, hardware=hardware, engine={"image": "x", "imagePullPolicy": "Always"})
    (container,) = spec["containers"]
    assert container["resources"] == {"limits": {"cpu": "4", "nvidia.com/gpu": "2"}, "requests": {"cpu": "2"}}
    assert container["imagePullPolicy"] == "Always"
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in spec["volumes"]


def test_demo_contains_the_shipped_chat_template() -> None:
    manifest = yaml.safe_load((ROOT / "examples/01-demo.yaml").read_text())
    template = (ROOT / "examples/chat-template.jinja").read_text()
    assert manifest["spec"]["model"]["chatTemplate"]["value"] == template
