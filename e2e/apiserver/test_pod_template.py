"""Merging of a user's pod template: equal to kubectl's, and accepted by a real API server in strict mode."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from apiserver import kube_binary
from kubernetes import client

from stoker_operator.api.manifest import parse
from stoker_operator.cli.render import render
from stoker_operator.cluster.kube import Kube
from stoker_operator.manifests.pod_template_merge import merge_pod_spec
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.reconcile.drift import differs

from .cluster_client import wait_for

ENDPOINT: dict[str, Any] = {
    "apiVersion": "stoker.dev/v1alpha1",
    "kind": "InferenceEndpoint",
    "metadata": {"name": "demo"},
    "spec": {"model": {"source": "demo://gemma-3-270m"}, "hardware": {"accelerator": "cpu"}},
}
CONSTRAINT = {
    "maxSkew": 1,
    "topologyKey": "zone",
    "whenUnsatisfiable": "ScheduleAnyway",
    "labelSelector": {"matchLabels": {"a": "b"}},
}
VOLUMES = [
    {"name": "cache", "emptyDir": {"sizeLimit": "2Gi"}},
    {"name": "more", "configMap": {"name": "c", "items": [{"key": "k", "path": "p"}]}},
]
MOUNTS = [{"name": "more", "mountPath": "/cache"}, {"name": "more", "mountPath": "/more", "subPath": "p"}]

#: Templates that kubectl merges in the intended way.
TEMPLATES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "maps": {
        "securityContext": {"fsGroup": 7, "runAsUser": 8},
        "nodeSelector": {"a": "b"},
        "dnsConfig": {"searches": ["x"]},
    },
    "values": {"serviceAccountName": "mine", "priorityClassName": "high", "automountServiceAccountToken": True},
    "nulls": {
        "securityContext": {"fsGroup": None, "runAsUser": None},
        "serviceAccountName": None,
        "nodeSelector": {"a": None, "b": "c"},
        "containers": [
            {"name": "engine", "readinessProbe": None, "securityContext": {"readOnlyRootFilesystem": None}},
        ],
    },
    "volumes": {"volumes": VOLUMES, "containers": [{"name": "engine", "volumeMounts": MOUNTS}]},
    "sidecar": {
        "containers": [
            {
                "name": "proxy",
                "image": "p",
                "ports": [{"containerPort": 1, "protocol": "TCP"}],
                "env": [{"name": "A", "value": "b"}],
            }
        ]
    },
    "engine": {
        "containers": [
            {
                "name": "engine",
                "ports": [{"containerPort": 9000, "protocol": "UDP", "name": "more"}],
                "readinessProbe": {"periodSeconds": 9, "httpGet": {"httpHeaders": [{"name": "a", "value": "b"}]}},
                "securityContext": {"capabilities": {"add": ["SYS_NICE"]}, "runAsUser": 5},
                "envFrom": [{"secretRef": {"name": "s"}}],
                "lifecycle": {"postStart": {"sleep": {"seconds": 1}}},
            }
        ]
    },
    "lists": {
        "initContainers": [{"name": "init", "image": "i"}],
        "imagePullSecrets": [{"name": "s"}],
        "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["h"]}],
        "topologySpreadConstraints": [CONSTRAINT],
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "schedulingGates": [{"name": "a.b/c"}],
        "resourceClaims": [{"name": "nic", "resourceClaimName": "n"}],
        "containers": [{"name": "engine", "volumeDevices": [{"devicePath": "/dev/x", "name": "more"}]}],
        "volumes": VOLUMES[1:],
    },
}

#: Values that the API server stores in another form than they were written.
AWKWARD: dict[str, Any] = {
    "hostNetwork": False,
    "hostname": "",
    "nodeSelector": {},
    "imagePullSecrets": [],
    "tolerations": [{"key": "a", "operator": "Equal", "value": "", "effect": "NoExecute", "tolerationSeconds": 0}],
    "volumes": [
        {"name": "more", "emptyDir": {"sizeLimit": "1024Mi"}},
        {"name": "config", "configMap": {"name": "c", "optional": False}},
        {"name": "pod", "downwardAPI": {"items": [{"path": "l", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
    ],
    "containers": [
        {"name": "engine", "volumeMounts": MOUNTS},
        {
            "name": "proxy",
            "image": "p",
            "command": [],
            "stdin": False,
            "env": [
                {"name": "EMPTY", "value": ""},
                {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "0"}}},
            ],
            "ports": [{"containerPort": 1, "hostPort": 0}, {"containerPort": 2, "protocol": "UDP"}],
            "resources": {"limits": {"cpu": "1000m", "memory": "0.5Gi"}, "requests": {"cpu": 1}},
            "readinessProbe": {"tcpSocket": {"port": 1}, "initialDelaySeconds": 0},
            "securityContext": {"runAsUser": 0, "privileged": False},
        },
    ],
}


def deployment(**spec: Any) -> dict[str, Any]:
    document = copy.deepcopy(ENDPOINT)
    document["spec"] |= spec
    objects = render(parse(document), Catalogue.load())
    return next(each for each in objects if each["kind"] == "Deployment")


def by_name(spec: Any) -> Any:
    """Sort lists of named entries: kubectl may put new ones first."""
    if isinstance(spec, dict):
        return {key: by_name(value) for key, value in spec.items()}
    if isinstance(spec, list):
        return sorted(map(by_name, spec), key=lambda each: json.dumps(each, sort_keys=True))
    return spec


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_is_merged_as_by_kubectl(name: str, tmp_path: Path) -> None:
    live = deployment()
    file = tmp_path / "deployment.json"
    file.write_text(json.dumps(live))
    patch = json.dumps({"spec": {"template": {"spec": TEMPLATES[name]}}})
    (tmp_path / "kubectl").symlink_to(kube_binary())
    kubectl = [str(tmp_path / "kubectl"), "patch", "--local", "--type=strategic", f"--filename={file}"]
    command = [*kubectl, f"--patch={patch}", "--output=json"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    merged = merge_pod_spec(live["spec"]["template"]["spec"], TEMPLATES[name])
    assert by_name(merged) == by_name(json.loads(result.stdout)["spec"]["template"]["spec"])


def test_merged_template_is_stored_unchanged(kube: Any, ns: str) -> None:
    server = Kube(kube.api)
    gpu = {"accelerator": "nvidia-l4", "count": 2}
    required = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    specs: list[dict[str, Any]] = [
        *({"template": {"spec": template}} for name, template in TEMPLATES.items() if name != "lists"),
        {"hardware": gpu, "engine": {"image": "x"}, "template": {"spec": {"affinity": affinity}}},
        {
            "model": {"source": "hf://org/name", "tokenSecretRef": {"name": "s", "key": "k"}},
            "hardware": gpu,
            "engine": {"runtime": "vllm", "args": ["--ssl-certfile=/tls/tls.crt"]},
            "auth": {"apiKeysSecretRef": {"name": "s"}},
            "template": {"spec": {"tolerations": TEMPLATES["lists"]["tolerations"]}},
        },
        {"auth": {"apiKeysSecretRef": {"name": "s"}}, "storage": {"shmSize": "1024Mi"}, "rollout": {"maxSurge": "50%"}},
        {"template": {"spec": AWKWARD}},
    ]
    for spec in specs:
        document = copy.deepcopy(ENDPOINT)
        document["metadata"]["namespace"] = ns
        document["spec"] |= spec
        for child in render(parse(document), Catalogue.load()):
            taken = server.apply(child, "stoker", dry_run=True)
            assert not differs(child, taken, "stoker"), (spec, child["kind"])
    wrong = deployment(template={"spec": {"containers": [{"name": "engine", "imagee": "x"}]}})
    wrong["metadata"]["namespace"] = ns
    with pytest.raises(Exception, match="imagee"):
        server.apply(wrong, "stoker", dry_run=True)


def test_pods_are_admitted_by_the_restricted_standard(kube: Any, ns: str) -> None:
    kube.core.patch_namespace(ns, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}})
    wait_for(lambda: kube.core.read_namespaced_service_account("default", ns), "the namespace's service account")

    def restricted() -> bool:
        exposed = {"hostNetwork": True, "containers": [{"name": "engine", "image": "i"}]}
        try:
            kube.core.create_namespaced_pod(ns, {"metadata": {"name": "demo"}, "spec": exposed}, dry_run="All")
        except client.ApiException as error:
            return "violates PodSecurity" in error.body
        return False

    wait_for(restricted, "the API server applies the label")
    vllm = {"model": {"source": "hf://org/name"}, "engine": {"runtime": "vllm", "image": "v"}}
    keys = {"auth": {"apiKeysSecretRef": {"name": "s"}}, "storage": {"shmSize": "1Gi"}}
    for spec in ({}, keys, {**vllm, "hardware": {"accelerator": "nvidia-l4"}}):
        pod = deployment(**spec)["spec"]["template"]["spec"] | {"serviceAccountName": "default"}
        body = {"metadata": {"name": "demo"}, "spec": pod}
        kube.core.create_namespaced_pod(ns, body, dry_run="All")
        pod["hostNetwork"] = True
        with pytest.raises(client.ApiException, match="violates PodSecurity"):
            kube.core.create_namespaced_pod(ns, body, dry_run="All")
