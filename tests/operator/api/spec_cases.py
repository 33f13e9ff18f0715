"""Valid specs; `rule_breakers` and `schema_faults` make invalid ones.

Two validators get the same specs: Python here, and a real API server in e2e/apiserver. Invalid specs come from two
modules. `rule_breakers` are written by hand, one or more per rule. `schema_faults` changes every field of the schema in
every way the schema knows: type, bounds, length, enum, pattern, required, unknown, duplicate. The rest of the valid
spec is unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]
Schema = dict[str, Any]
#: Steps from the spec to a field: names, and indices of lists.
Path = tuple[str | int, ...]

CPU = {"accelerator": "cpu"}
GPUS = {"accelerator": "nvidia-h100-80gb", "count": 4}
DEMO = {"source": "demo://gemma-3-270m"}


@dataclass(frozen=True)
class Wrong:
    """An invalid spec.

    Attributes:
        name: description of the fault.
        spec: the whole spec.
        field: field of the expected error.
        sentence: start of the message of both validators; empty if their messages differ.
    """

    name: str
    spec: Spec
    field: str
    sentence: str = ""


def spec(**parts: Any) -> Spec:
    """Return a minimal spec with these parts."""
    return copy.deepcopy({"model": DEMO, "hardware": CPU, **parts})


def claim(*modes: str, **more: Any) -> Spec:
    """Return a spec with a cache on a claim of these access modes."""
    template = {"spec": {"accessModes": list(modes), "resources": {"requests": {"storage": "1Gi"}}, **more}}
    return {"cache": {"volumeClaimTemplate": template}}


def labelled_claim(metadata: Any) -> Spec:
    """Return a spec with a cache on a claim with labels and annotations."""
    cache = claim("ReadWriteMany")
    cache["cache"]["volumeClaimTemplate"]["metadata"] = metadata
    return cache


#: Fields with labels and annotations: name, path, and a spec that has the field.
METADATA: tuple[tuple[str, str, Callable[[str, Any], Spec]], ...] = (
    ("the pods", "spec.template.metadata", lambda field, keys: spec(template={"metadata": {field: keys}})),
    ("the Service", "spec.service", lambda field, keys: spec(service={field: keys})),
    (
        "the claim",
        "spec.storage.cache.volumeClaimTemplate.metadata",
        lambda field, keys: spec(storage=labelled_claim({field: keys})),
    ),
)
#: Invalid keys: a label's and an annotation's.
WRONG_KEYS = (("a b", "a/b/c"), ("a" * 64, f"{'a' * 254}/b"), ("B.example.com/a", "-a"))
WRONG_KEY = "Kubernetes does not allow one of the keys; use NAME or PREFIX/NAME, where NAME has at most 63 letters, "
COMPARES_WITH_NOTHING = {"key": "a", "operator": "In"}
#: Valid specs by name; together they use every field.
RIGHT: dict[str, Spec] = {
    "minimal": spec(),
    "no replicas": spec(replicas=0),
    "all accelerators for one engine": spec(hardware=GPUS),
    "empty parallelism": spec(hardware=GPUS, parallelism={}),
    "one engine per accelerator": spec(hardware=GPUS, parallelism={"data": 4}),
    "two engines of two accelerators": spec(hardware=GPUS, parallelism={"tensor": 2}),
    "explicit sizes": spec(hardware=GPUS, parallelism={"tensor": 1, "data": 4}, engine={"kvCacheDtype": "fp8_e4m3"}),
    "idle accelerators on purpose": spec(hardware={**GPUS, "allowIdle": True}, parallelism={"tensor": 3}),
    "two nodes": spec(hardware={**GPUS, "nodes": 2}, parallelism={"tensor": 4, "pipeline": 2}),
    "data over two nodes": spec(hardware={**GPUS, "nodes": 2}, parallelism={"data": 2}),
    "experts": spec(hardware=GPUS, parallelism={"tensor": 2, "data": 2, "expert": 4, "pipeline": 1}),
    "chosen by the planner": spec(hardware=GPUS, parallelism={"mode": "Auto", "minConcurrency": 16}),
    "chosen by the planner, on two nodes": spec(hardware={**GPUS, "nodes": 2}, parallelism={"mode": "Auto"}),
    "chosen by the planner, on a cpu": spec(parallelism={"mode": "Auto"}),
    "minConcurrency alone": spec(hardware=GPUS, parallelism={"minConcurrency": 1}),
    "the maximum number of accelerators": spec(
        hardware={**GPUS, "count": 64, "nodes": 2}, parallelism={"tensor": 64, "data": 1, "pipeline": 2}
    ),
    "sizes of one on a cpu": spec(
        hardware={**CPU, "count": 1, "nodes": 1}, parallelism={"tensor": 1, "data": 1, "pipeline": 1, "expert": 1}
    ),
    "ranks that share a cpu": spec(parallelism={"tensor": 2, "data": 2, "pipeline": 2}),
    "the maximum number of ranks on a cpu": spec(parallelism={"data": 64}),
    "experts distributed over a cpu's ranks": spec(
        parallelism={"tensor": 2, "expert": 2, "minConcurrency": 1}, engine={"runtime": "stoker"}
    ),
    "one engine on a cpu by another runtime": spec(parallelism={"tensor": 1, "data": 1}, engine={"runtime": "vllm"}),
    "fp8 keys and values on a cpu by another runtime": spec(engine={"runtime": "vllm", "kvCacheDtype": "fp8"}),
    "keys and values with a scale for each token and head": spec(engine={"kvCacheDtype": "int8_per_token_head"}),
    "weights that are quantized on load": spec(engine={"quantization": "int8", "kvCacheDtype": "fp8"}),
    "a model on a claim": spec(model={"source": "pvc://claim"}),
    "a file on a claim": spec(model={"source": "pvc://claim/folder/file.gguf"}),
    "a template in a config map": spec(
        model={**DEMO, "chatTemplate": {"configMapKeyRef": {"name": "templates", "key": "chat.jinja"}}}
    ),
    "model": spec(
        model={
            "source": "hf://org/name",
            "revision": "refs/pr/1",
            "servedNames": ["a", "b/c"],
            "tokenSecretRef": {"name": "hugging-face", "key": "token"},
            "trustRemoteCode": True,
            "chatTemplate": {"value": "{{ messages }}"},
        }
    ),
    "resources": spec(
        hardware={
            **CPU,
            "resources": {
                "limits": {"cpu": 4, "memory": "1.5Gi"},
                "requests": {"cpu": "500m", "memory": "1e9"},
                "claims": [{"name": "gpu", "request": "one"}, {"name": "nic"}],
            },
        }
    ),
    "engine": spec(
        engine={
            "runtime": "stoker",
            "image": "mine:1",
            "imagePullPolicy": "Always",
            "dtype": "float32",
            "quantization": "compressed-tensors",
            "kvCacheDtype": "auto",
            "maxNumSeqs": 8,
            "maxNumBatchedTokens": 2048,
            "maxModelLen": 4096,
            "gpuMemoryUtilizationPercent": 90,
            "enablePrefixCaching": False,
            "args": ["--seed=1"],
            "env": [
                {"name": "PLAIN", "value": "x"},
                {"name": "EMPTY"},
                {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b", "optional": True}}},
                {"name": "CONFIG", "valueFrom": {"configMapKeyRef": {"name": "a", "key": "b", "optional": False}}},
                {"name": "FIELD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name", "apiVersion": "v1"}}},
                {
                    "name": "RESOURCE",
                    "valueFrom": {
                        "resourceFieldRef": {"resource": "limits.memory", "containerName": "engine", "divisor": "1Mi"}
                    },
                },
                {
                    "name": "FILE",
                    "valueFrom": {"fileKeyRef": {"volumeName": "v", "path": "env", "key": "K", "optional": True}},
                },
            ],
        }
    ),
    "template": spec(
        template={
            "metadata": {"labels": {"team": "a.B_c-d", "empty": ""}, "annotations": {"note": "any text: ä"}},
            "spec": {"nodeSelector": {"disk": "ssd"}, "containers": [{"name": "sidecar", "image": "x"}], "any": [1]},
        }
    ),
    "auth": spec(auth={"apiKeysSecretRef": {"name": "keys"}}),
    "a cache on an existing claim": spec(
        storage={"cache": {"persistentVolumeClaim": {"claimName": "weights"}}, "shmSize": "8Gi"}
    ),
    "a cache in memory": spec(storage={"cache": {"emptyDir": {"sizeLimit": "10Gi", "medium": "Memory"}}}),
    "a cache on a claim from a template": spec(
        replicas=3,
        storage={
            "cache": {
                "volumeClaimTemplate": {
                    "metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}},
                    "spec": {
                        "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
                        "resources": {"requests": {"storage": "10Gi"}, "limits": {"storage": "20Gi"}},
                        "storageClassName": "fast",
                        "volumeName": "pv-1",
                        "volumeMode": "Filesystem",
                        "volumeAttributesClassName": "gold",
                        "selector": {
                            "matchLabels": {"a": "b"},
                            "matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}],
                        },
                        "dataSource": {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "a"},
                        "dataSourceRef": {
                            "apiGroup": "snapshot.storage.k8s.io",
                            "kind": "VolumeSnapshot",
                            "name": "a",
                            "namespace": "b",
                        },
                    },
                }
            }
        },
    ),
    "a cache for one pod": spec(storage=claim("ReadWriteOnce"), rollout={"maxSurge": 0, "maxUnavailable": 1}),
    "a cache for one pod, in percent": spec(
        replicas=0, storage=claim("ReadWriteOncePod"), rollout={"maxSurge": "0%", "maxUnavailable": "100%"}
    ),
    "service": spec(
        service={
            "type": "LoadBalancer",
            "port": 80,
            "labels": {"pool": "a", "a.b-c.example.com/D_e.f-0": "", "g" * 63: "h" * 63, f"{'i' * 253}/j": "k"},
            "annotations": {"a": "b", "Example.com/c": "d"},
        },
        networkPolicy={"mode": "Open"},
    ),
    "a node port without a network policy": spec(service={"type": "NodePort"}, networkPolicy={"mode": "None"}),
    "a network policy with additional senders": spec(
        service={"type": "NodePort"},
        networkPolicy={
            "mode": "Namespace",
            "from": [
                {
                    "podSelector": {
                        "matchLabels": {"a": "b"},
                        "matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}],
                    },
                    "namespaceSelector": {
                        "matchLabels": {"a": "b"},
                        "matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}],
                    },
                },
                {"podSelector": {}},
                {"namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}},
                {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16", "10.2.0.0/16"]}},
                {"ipBlock": {"cidr": "2001:db8::/32", "except": ["2001:db8:1::/48"]}},
            ],
        },
    ),
    "rollout": spec(
        rollout={
            "maxSurge": "25%",
            "maxUnavailable": 1,
            "drainSeconds": 0,
            "startupTimeoutSeconds": 600,
            "imageUpdates": "Always",
        }
    ),
    "monitoring": spec(monitoring={"podMonitor": "Disabled"}),
    "routing": spec(routing={"gateway": "Enabled", "sessionHeader": "X-Session-Id"}),
    "scaling": spec(
        scaling={
            "minReplicas": 0,
            "maxReplicas": 8,
            "metric": "pendingRequests",
            "target": 4,
            "idleSecondsToZero": 600,
            "holdSeconds": 120,
            "behavior": {
                "scaleUp": {
                    "stabilizationWindowSeconds": 0,
                    "selectPolicy": "Max",
                    "policies": [
                        {"type": "Pods", "value": 4, "periodSeconds": 15},
                        {"type": "Percent", "value": 100, "periodSeconds": 1800},
                    ],
                    "tolerance": 0.05,
                },
                "scaleDown": {
                    "stabilizationWindowSeconds": 3600,
                    "selectPolicy": "Disabled",
                    "policies": [{"type": "Percent", "value": 1, "periodSeconds": 1}],
                    "tolerance": 1,
                },
            },
        }
    ),
    "scaling with its required fields only": spec(scaling={"maxReplicas": 1, "target": 0.5}, replicas=7),
    "equal bounds of replicas": spec(scaling={"minReplicas": 2, "maxReplicas": 2, "target": 1}),
    "scaling by the cache": spec(scaling={"maxReplicas": 2, "metric": "kvCacheUsage", "target": 0.999}),
    "a target that two engines together can exceed": spec(
        hardware=GPUS,
        parallelism={"data": 2},
        engine={"maxNumSeqs": 8},
        scaling={"maxReplicas": 2, "metric": "runningRequests", "target": 15.9},
    ),
    "a target that the engines of two nodes together can exceed": spec(
        hardware={**GPUS, "nodes": 2},
        parallelism={"tensor": 2},
        engine={"maxNumSeqs": 8},
        scaling={"maxReplicas": 2, "metric": "runningRequests", "target": 31.9},
    ),
    "a target that as many engines as the planner may choose can exceed": spec(
        hardware=GPUS,
        parallelism={"mode": "Auto"},
        engine={"maxNumSeqs": 8},
        scaling={"maxReplicas": 2, "metric": "runningRequests", "target": 31.9},
    ),
    "a target that the engines of a cpu together can exceed": spec(
        parallelism={"data": 2, "tensor": 2},
        engine={"maxNumSeqs": 8},
        scaling={"maxReplicas": 2, "metric": "runningRequests", "target": 15.9},
    ),
    "pending requests beyond the batch": spec(
        engine={"maxNumSeqs": 8}, scaling={"maxReplicas": 2, "metric": "pendingRequests", "target": 9}
    ),
    "a cache for one scaled pod": spec(
        replicas=3,
        scaling={"minReplicas": 0, "maxReplicas": 1, "target": 4},
        storage=claim("ReadWriteOnce"),
        rollout={"maxSurge": 0, "maxUnavailable": 1},
    ),
}
