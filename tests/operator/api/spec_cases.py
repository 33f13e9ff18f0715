"""Specs that are right, and specs that are wrong in every way a spec can be.

Two judges are given the same specimens: Python here, and a real API server in e2e/apiserver. Wrong ones come from two
places. `RULE_BREAKERS` are written by hand, one or more for each rule. `generated` takes every field of the schema and
puts it wrong in every way the schema knows: type, bounds, length, enum, pattern, required, unknown, twice. The rest of
a right spec stays as it was.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
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
    """A wrong spec.

    Attributes:
        name: what is wrong with it.
        spec: the whole spec.
        field: the field to be blamed.
        sentence: how what both judges say of it begins; empty where each has its own words.
    """

    name: str
    spec: Spec
    field: str
    sentence: str = ""


def spec(**parts: Any) -> Spec:
    """A minimal spec with these parts."""
    return copy.deepcopy({"model": DEMO, "hardware": CPU, **parts})


def claim(*modes: str, **more: Any) -> Spec:
    """A cache on a claim of these access modes."""
    template = {"spec": {"accessModes": list(modes), "resources": {"requests": {"storage": "1Gi"}}, **more}}
    return {"cache": {"volumeClaimTemplate": template}}


def labelled_claim(metadata: Any) -> Spec:
    """A cache on a claim with labels and annotations."""
    cache = claim("ReadWriteMany")
    cache["cache"]["volumeClaimTemplate"]["metadata"] = metadata
    return cache


#: What has labels and annotations: its name, its path, and a spec in which it has such a field.
METADATA: tuple[tuple[str, str, Callable[[str, Any], Spec]], ...] = (
    ("the pods", "spec.template.metadata", lambda field, keys: spec(template={"metadata": {field: keys}})),
    ("the Service", "spec.service", lambda field, keys: spec(service={field: keys})),
    (
        "the claim",
        "spec.storage.cache.volumeClaimTemplate.metadata",
        lambda field, keys: spec(storage=labelled_claim({field: keys})),
    ),
)
#: Keys that there cannot be: a label's and an annotation's for each of them.
WRONG_KEYS = (("a b", "a/b/c"), ("a" * 64, f"{'a' * 254}/b"), ("B.example.com/a", "-a"))
WRONG_KEY = "Kubernetes takes no such key; use NAME or PREFIX/NAME, where NAME has at most 63 letters, digits, "

COMPARES_WITH_NOTHING = {"key": "a", "operator": "In"}


#: Right specs by name; together they use every field.
RIGHT: dict[str, Spec] = {
    "minimal": spec(),
    "no replicas": spec(replicas=0),
    "all of them for one copy": spec(hardware=GPUS),
    "parallelism that says nothing": spec(hardware=GPUS, parallelism={}),
    "one engine for each": spec(hardware=GPUS, parallelism={"data": 4}),
    "two engines of two": spec(hardware=GPUS, parallelism={"tensor": 2}),
    "explicit sizes": spec(hardware=GPUS, parallelism={"tensor": 1, "data": 4}, engine={"kvCacheDtype": "fp8_e4m3"}),
    "idle on purpose": spec(hardware={**GPUS, "allowIdle": True}, parallelism={"tensor": 3}),
    "two nodes": spec(hardware={**GPUS, "nodes": 2}, parallelism={"tensor": 4, "pipeline": 2}),
    "data over two nodes": spec(hardware={**GPUS, "nodes": 2}, parallelism={"data": 2}),
    "experts": spec(hardware=GPUS, parallelism={"tensor": 2, "data": 2, "expert": 4, "pipeline": 1}),
    "chosen by the planner": spec(hardware=GPUS, parallelism={"mode": "Auto", "minConcurrency": 16}),
    "chosen by the planner, on two nodes": spec(hardware={**GPUS, "nodes": 2}, parallelism={"mode": "Auto"}),
    "chosen by the planner, on a cpu": spec(parallelism={"mode": "Auto"}),
    "a floor, and all else as always": spec(hardware=GPUS, parallelism={"minConcurrency": 1}),
    "the most accelerators": spec(
        hardware={**GPUS, "count": 64, "nodes": 2}, parallelism={"tensor": 64, "data": 1, "pipeline": 2}
    ),
    "sizes of one on a cpu": spec(
        hardware={**CPU, "count": 1, "nodes": 1}, parallelism={"tensor": 1, "data": 1, "pipeline": 1, "expert": 1}
    ),
    "ranks that share a cpu": spec(parallelism={"tensor": 2, "data": 2, "pipeline": 2}),
    "as many ranks as share a cpu": spec(parallelism={"data": 64}),
    "experts dealt over a cpu's ranks": spec(
        parallelism={"tensor": 2, "expert": 2, "minConcurrency": 1}, engine={"runtime": "stoker"}
    ),
    "one engine on a cpu by another runtime": spec(parallelism={"tensor": 1, "data": 1}, engine={"runtime": "vllm"}),
    "fp8 keys and values on a cpu by another runtime": spec(engine={"runtime": "vllm", "kvCacheDtype": "fp8"}),
    "keys and values with a scale for each token and head": spec(engine={"kvCacheDtype": "int8_per_token_head"}),
    "weights that are quantized when they are loaded": spec(engine={"quantization": "int8", "kvCacheDtype": "fp8"}),
    "a claim": spec(model={"source": "pvc://claim"}),
    "a file of a claim": spec(model={"source": "pvc://claim/folder/file.gguf"}),
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
    "a cache on a claim that exists": spec(
        storage={"cache": {"persistentVolumeClaim": {"claimName": "weights"}}, "shmSize": "8Gi"}
    ),
    "a cache in memory": spec(storage={"cache": {"emptyDir": {"sizeLimit": "10Gi", "medium": "Memory"}}}),
    "a cache on a claim that is made": spec(
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
    "a node's port for the namespace's own policies": spec(
        service={"type": "NodePort"}, networkPolicy={"mode": "None"}
    ),
    "who may come": spec(
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
}

_FOUR = "tensor × data must be 4 (4 × 1, 2 × 2 or 1 × 4)"
_ONE_POD = "this claim is for one pod, and there may be two; use access mode ReadWriteMany, or replicas 1 with rollout"

#: Specs that break a rule, one or more for each.
RULE_BREAKERS = (
    Wrong(
        "too many",
        spec(hardware=GPUS, parallelism={"tensor": 2, "data": 4}),
        "spec.parallelism",
        f"tensor (2) × data (4) needs 8 GPUs, 4 available; {_FOUR}, or hardware.count 8",
    ),
    Wrong(
        "too many with a pipeline",
        spec(hardware=GPUS, parallelism={"tensor": 2, "data": 2, "pipeline": 2}),
        "spec.parallelism",
        "tensor (2) × data (2) × pipeline (2) needs 8 GPUs, 4 available; tensor × data must be 2 (2 × 1 or 1 × 2), or "
        "hardware.count 8",
    ),
    Wrong(
        "too few",
        spec(hardware=GPUS, parallelism={"tensor": 3, "data": 1}),
        "spec.parallelism",
        f"tensor (3) × data (1) uses 3 of 4 GPUs, 1 would be idle; {_FOUR}, or hardware.allowIdle true",
    ),
    Wrong(
        "too few by far",
        spec(hardware=GPUS, parallelism={"tensor": 1, "data": 1}),
        "spec.parallelism",
        f"tensor (1) × data (1) uses 1 of 4 GPUs, 3 would be idle; {_FOUR}, or hardware.allowIdle true",
    ),
    Wrong(
        "too few, explicitly not to be idle",
        spec(hardware={**GPUS, "allowIdle": False}, parallelism={"tensor": 3}),
        "spec.parallelism",
        f"tensor (3) × data (1) uses 3 of 4 GPUs, 1 would be idle; {_FOUR}",
    ),
    Wrong(
        "too many are not idle ones",
        spec(hardware={**GPUS, "allowIdle": True}, parallelism={"tensor": 8}),
        "spec.parallelism",
        f"tensor (8) × data (1) needs 8 GPUs, 4 available; {_FOUR}",
    ),
    Wrong(
        "tensor given, the rest does not come out even",
        spec(hardware={**GPUS, "count": 8}, parallelism={"tensor": 3}),
        "spec.parallelism",
        "tensor (3) × data (2) uses 6 of 8 GPUs, 2 would be idle; tensor × data must be 8 (8 × 1, 4 × 2",
    ),
    Wrong(
        "data given, the rest does not come out even",
        spec(hardware=GPUS, parallelism={"data": 3}),
        "spec.parallelism",
        f"tensor (1) × data (3) uses 3 of 4 GPUs, 1 would be idle; {_FOUR}",
    ),
    Wrong(
        "data given, more than there are",
        spec(hardware=GPUS, parallelism={"data": 8}),
        "spec.parallelism",
        f"tensor (1) × data (8) needs 8 GPUs, 4 available; {_FOUR}, or hardware.count 8",
    ),
    Wrong(
        "a pipeline that does not come out even",
        spec(hardware=GPUS, parallelism={"pipeline": 3}),
        "spec.parallelism",
        "tensor (1) × data (1) × pipeline (3) uses 3 of 4 GPUs, 1 would be idle; pipeline must divide 4 (1, 2 or 4)",
    ),
    Wrong(
        "more than any node has",
        spec(hardware={"accelerator": "nvidia-l4"}, parallelism={"tensor": 128, "data": 128, "pipeline": 128}),
        "spec.parallelism",
        "tensor (128) × data (128) × pipeline (128) needs 2097152 GPUs, 1 available; pipeline must divide 1 (1)",
    ),
    Wrong(
        "two nodes, wrongly",
        spec(hardware={**GPUS, "nodes": 2}, parallelism={"tensor": 4, "data": 4}),
        "spec.parallelism",
        "tensor (4) × data (4) needs 16 GPUs, 8 available; tensor must be at most 4, and tensor × data 8",
    ),
    Wrong(
        "two nodes, a stage each, wrongly",
        spec(hardware={**GPUS, "nodes": 2}, parallelism={"tensor": 2, "data": 1, "pipeline": 2}),
        "spec.parallelism",
        "tensor (2) × data (1) × pipeline (2) uses 4 of 8 GPUs, 4 would be idle; tensor must be at most 4, and "
        "tensor × data 4, or hardware.allowIdle true",
    ),
    Wrong(
        "tensor beyond a node",
        spec(hardware={**GPUS, "nodes": 2}),
        "spec.parallelism",
        "tensor is more than the accelerators of a node; tensor must be at most hardware.count, and pipeline or data",
    ),
    Wrong(
        "too many nodes",
        spec(hardware={**GPUS, "count": 64, "nodes": 3}),
        "spec.hardware.nodes",
        "count × nodes is more than 128, the most accelerators a replica may have; lower one of them",
    ),
    Wrong(
        "a split model on a cpu by another runtime",
        spec(parallelism={"tensor": 2}, engine={"runtime": "vllm"}),
        "spec.parallelism",
        "on accelerator cpu, a runtime other than stoker runs one engine of the model, unsplit; remove parallelism, "
        "and use spec.replicas for more engines, or use runtime: stoker",
    ),
    Wrong(
        "more ranks than share a cpu",
        spec(parallelism={"tensor": 3, "data": 11, "pipeline": 2}),
        "spec.parallelism",
        "tensor × pipeline × data is more than 64, the most that a pod's processors are shared by; lower one of them",
    ),
    *(
        Wrong(
            f"{size} chosen twice",
            spec(hardware=GPUS, parallelism={"mode": "Auto", size: 4 if size != "pipeline" else 1}),
            "spec.parallelism.mode",
            f"mode Auto chooses {size}, and {size} is given as well; remove mode or {size}",
        )
        for size in ("tensor", "data", "pipeline", "expert")
    ),
    Wrong(
        "experts on a cpu by another runtime",
        spec(parallelism={"expert": 2}, engine={"runtime": "vllm"}),
        "spec.parallelism",
        "on accelerator cpu, a runtime other than stoker runs one engine of the model, unsplit; remove parallelism",
    ),
    Wrong(
        "cpus counted",
        spec(hardware={**CPU, "count": 2}),
        "spec.hardware.count",
        "accelerator cpu is not counted: a pod is one; remove count, and size the pod with spec.hardware.resources",
    ),
    Wrong(
        "a cpu on two nodes",
        spec(hardware={**CPU, "nodes": 2}),
        "spec.hardware.nodes",
        "accelerator cpu does not span nodes; remove nodes, and use spec.replicas",
    ),
    Wrong(
        "a bucket", spec(model={"source": "s3://bucket"}), "spec.model.source", "this is no model source; use hf://ORG/"
    ),
    Wrong(
        "half a name",
        spec(model={"source": "hf://name"}),
        "spec.model.source",
        "this is no model source; use hf://ORG/",
    ),
    Wrong(
        "another demo",
        spec(model={"source": "demo://other"}),
        "spec.model.source",
        "there is no such demo model; use demo://gemma-3-270m",
    ),
    Wrong(
        "out of the claim",
        spec(model={"source": "pvc://a/../b"}),
        "spec.model.source",
        "the path leaves the claim; use a",
    ),
    Wrong(
        "a revision of a file",
        spec(model={"source": "file:///m", "revision": "main"}),
        "spec.model.revision",
        "only hf:// sources have revisions; remove revision, or name a hub repository",
    ),
    Wrong(
        "a token for a demo",
        spec(model={**DEMO, "tokenSecretRef": {"name": "a", "key": "b"}}),
        "spec.model.tokenSecretRef",
        "only hf:// sources take a token; remove tokenSecretRef, or name a hub repository",
    ),
    Wrong(
        "no chat template in it",
        spec(model={**DEMO, "chatTemplate": {}}),
        "spec.model.chatTemplate",
        "a chat template is given once; set either value or configMapKeyRef",
    ),
    Wrong(
        "two chat templates",
        spec(model={**DEMO, "chatTemplate": {"value": "x", "configMapKeyRef": {"name": "a", "key": "b"}}}),
        "spec.model.chatTemplate",
        "a chat template is given once; set either value or configMapKeyRef",
    ),
    Wrong(
        "no cache in it",
        spec(storage={"cache": {}}),
        "spec.storage.cache",
        "the cache is in one place; set one of emptyDir, persistentVolumeClaim and volumeClaimTemplate",
    ),
    Wrong(
        "two caches",
        spec(storage={"cache": {"emptyDir": {}, "persistentVolumeClaim": {"claimName": "a"}}}),
        "spec.storage.cache",
        "the cache is in one place; set one of emptyDir, persistentVolumeClaim and volumeClaimTemplate",
    ),
    Wrong(
        "a cache that two pods need while they roll",
        spec(storage=claim("ReadWriteOnce")),
        "spec.storage.cache",
        _ONE_POD,
    ),
    Wrong(
        "a cache that two replicas need",
        spec(replicas=2, storage=claim("ReadWriteOncePod"), rollout={"maxSurge": 0, "maxUnavailable": 1}),
        "spec.storage.cache",
        _ONE_POD,
    ),
    Wrong(
        "a cache that the pods of a replica need",
        spec(
            hardware={**GPUS, "nodes": 2},
            parallelism={"pipeline": 2},
            storage=claim("ReadWriteOnce"),
            rollout={"maxSurge": 0, "maxUnavailable": 1},
        ),
        "spec.storage.cache",
        _ONE_POD,
    ),
    Wrong(
        "a claim of no size",
        spec(
            storage={
                "cache": {
                    "volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {}}}}
                }
            }
        ),
        "spec.storage.cache.volumeClaimTemplate.spec.resources.requests",
        "a claim requests storage; set requests.storage, to 100Gi for example",
    ),
    Wrong(
        "no way to roll",
        spec(rollout={"maxSurge": 0}),
        "spec.rollout",
        "maxSurge 0 and maxUnavailable 0 leave no way to replace a pod; set maxUnavailable to 1, or maxSurge to 1",
    ),
    Wrong(
        "no way to roll, in percent",
        spec(rollout={"maxSurge": "0%", "maxUnavailable": "0%"}),
        "spec.rollout",
        "maxSurge 0 and maxUnavailable 0 leave no way to replace a pod; set maxUnavailable to 1, or maxSurge to 1",
    ),
    Wrong(
        "a variable with two values",
        spec(engine={"env": [{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "spec"}}}]}),
        "spec.engine.env[0]",
        "a variable has one value; set either value or valueFrom",
    ),
    Wrong(
        "a variable from nowhere",
        spec(engine={"env": [{"name": "A", "valueFrom": {}}]}),
        "spec.engine.env[0].valueFrom",
        "a value comes from one place; set one of secretKeyRef, configMapKeyRef, fieldRef, resourceFieldRef and file",
    ),
    Wrong(
        "a label of ours",
        spec(template={"metadata": {"labels": {"app.kubernetes.io/instance": "x"}}}),
        "spec.template.metadata.labels",
        "one of these labels is what the operator finds the pods by; use labels other than app.kubernetes.io/name",
    ),
    Wrong(
        "a label of ours on the Service",
        spec(service={"labels": {"app.kubernetes.io/managed-by": "x"}}),
        "spec.service.labels",
        "one of these labels is what the operator finds the Service by; use labels other than app.kubernetes.io/name",
    ),
    Wrong(
        "a label of ours on the claim",
        spec(storage=labelled_claim({"labels": {"a": "b", "stoker.dev/workload": "x"}})),
        "spec.storage.cache.volumeClaimTemplate.metadata.labels",
        "one of these labels is what the operator finds the claim by; use labels other than app.kubernetes.io/name",
    ),
    *(
        Wrong(f"{field} {key[:20]!r} of {name}", make(field, {"fine": "a", key: "a"}), f"{path}.{field}", WRONG_KEY)
        for (name, path, make), keys in zip(METADATA, WRONG_KEYS, strict=True)
        for field, key in zip(("labels", "annotations"), keys, strict=True)
    ),
    Wrong(
        "a selector by a label that there cannot be",
        spec(networkPolicy={"from": [{"podSelector": {"matchLabels": {"a b": "c"}}}]}),
        "spec.networkPolicy.from[0].podSelector.matchLabels",
        WRONG_KEY,
    ),
    Wrong(
        "a selector of namespaces by a label that there cannot be",
        spec(networkPolicy={"from": [{"namespaceSelector": {"matchLabels": {"A.b/c": "c"}}}]}),
        "spec.networkPolicy.from[0].namespaceSelector.matchLabels",
        WRONG_KEY,
    ),
    Wrong(
        "a selector of volumes by a label that there cannot be",
        spec(storage=claim("ReadWriteMany", selector={"matchLabels": {"a/": "c"}})),
        "spec.storage.cache.volumeClaimTemplate.spec.selector.matchLabels",
        WRONG_KEY,
    ),
    Wrong(
        "a load balancer for those inside",
        spec(service={"type": "LoadBalancer"}),
        "spec.networkPolicy",
        "a Service of type NodePort or LoadBalancer is for clients that mode Namespace keeps out; set networkPolicy.",
    ),
    Wrong(
        "a node's port for those inside",
        spec(service={"type": "NodePort"}, networkPolicy={"mode": "Namespace"}),
        "spec.networkPolicy",
        "a Service of type NodePort or LoadBalancer is for clients that mode Namespace keeps out; set networkPolicy.",
    ),
    *(
        Wrong(
            f"no session: {header}",
            spec(routing={"sessionHeader": header}),
            "spec.routing.sessionHeader",
            "this header cannot name a session: it is taken off requests, or is about the connection; use another one",
        )
        for header in ("x-stoker-session", "X-Gateway-A", "x-Envoy-retry", "HOST", "Connection", "te")
    ),
    Wrong(
        "everyone, and some",
        spec(networkPolicy={"mode": "Open", "from": [{"podSelector": {}}]}),
        "spec.networkPolicy.from",
        "clients are listed for mode Namespace only",
    ),
    Wrong(
        "a peer that is nobody",
        spec(networkPolicy={"from": [{"podSelector": {}}, {}]}),
        "spec.networkPolicy.from[1]",
        "a peer is either pods or addresses; set podSelector, namespaceSelector or both, or set ipBlock alone",
    ),
    Wrong(
        "a peer of both kinds",
        spec(networkPolicy={"from": [{"podSelector": {}, "ipBlock": {"cidr": "10.0.0.0/8"}}]}),
        "spec.networkPolicy.from[0]",
        "a peer is either pods or addresses; set podSelector, namespaceSelector or both, or set ipBlock alone",
    ),
    *(
        Wrong(
            f"no network: {cidr}",
            spec(networkPolicy={"from": [{"ipBlock": {"cidr": cidr}}]}),
            "spec.networkPolicy.from[0].ipBlock.cidr",
            "this is no network; use one such as 10.0.0.0/8",
        )
        for cidr in ("10.0.0.1/8", "10.0.0.0/33", "10.0.0/8", "010.0.0.0/8", "::ffff:0:0/96", "1::2::3/64", "::1/64")
    ),
    Wrong(
        "no network among those that are left out",
        spec(networkPolicy={"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16", "10.1.0.1/16"]}}]}),
        "spec.networkPolicy.from[0].ipBlock.except",
        "one of these is no network; use networks such as 10.1.0.0/16",
    ),
    *(
        Wrong(
            f"{inner} is not a part",
            spec(networkPolicy={"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": [inner]}}]}),
            "spec.networkPolicy.from[0].ipBlock.except",
            "one of these networks is not a part of cidr; use networks that cidr contains",
        )
        for inner in ("10.0.0.0/8", "11.0.0.0/16", "0.0.0.0/0", "2001:db8::/32")
    ),
    *(
        Wrong(
            f"{operator} {values}",
            spec(
                networkPolicy={
                    "from": [{"podSelector": {"matchExpressions": [{"key": "a", "operator": operator, **values}]}}]
                }
            ),
            "spec.networkPolicy.from[0].podSelector.matchExpressions[0].values",
            "In and NotIn compare with values, Exists and DoesNotExist with none; set values, or remove them",
        )
        for operator, values in (("In", {}), ("NotIn", {"values": []}), ("Exists", {"values": ["b"]}))
    ),
    *(
        Wrong(
            f"a selector of {where} that compares with nothing",
            change,
            f"spec.{where}.matchExpressions[0].values",
            "In and NotIn compare with values, Exists and DoesNotExist with none; set values, or remove them",
        )
        for where, change in (
            (
                "networkPolicy.from[0].namespaceSelector",
                spec(networkPolicy={"from": [{"namespaceSelector": {"matchExpressions": [COMPARES_WITH_NOTHING]}}]}),
            ),
            (
                "storage.cache.volumeClaimTemplate.spec.selector",
                spec(storage=claim("ReadWriteMany", selector={"matchExpressions": [COMPARES_WITH_NOTHING]})),
            ),
        )
    ),
    Wrong("autoscaling", spec(autoscaling={"minReplicas": 1}), "spec.autoscaling"),
    Wrong("gateway", spec(gateway={}), "spec.gateway"),
    Wrong("adapters", spec(adapters=[]), "spec.adapters"),
    Wrong("prefill", spec(prefill={"hardware": GPUS}), "spec.prefill"),
    Wrong("a variable twice", spec(engine={"env": [{"name": "A"}, {"name": "A", "value": "1"}]}), "spec.engine.env"),
    Wrong("a name twice", spec(model={**DEMO, "servedNames": ["a", "b", "a"]}), "spec.model.servedNames"),
)


@dataclass(frozen=True)
class Change:
    """A change of what is stored.

    Attributes:
        name: what is changed.
        before, after: ``spec.storage`` as it was and is to be.
        field: the field to be blamed; empty where nothing is wrong.
        sentence: what both judges say of it.
    """

    name: str
    before: Any
    after: Any
    field: str = ""
    sentence: str = ""


def _sized(storage: Any, **more: Any) -> Spec:
    return claim("ReadWriteMany", "ReadWriteOnce", **{"resources": {"requests": {"storage": storage}}, **more})


_EXISTING = {"cache": {"persistentVolumeClaim": {"claimName": "weights"}}}
_NODE = {"cache": {"emptyDir": {}}}
_MOVED = ("spec.storage.cache", "the cache cannot be changed; restore it, or delete the endpoint and create it again")
_CLAIM = "spec.storage.cache.volumeClaimTemplate.spec"
_OTHERWISE = (
    _CLAIM,
    "a claim can be resized and cannot be changed otherwise; restore it, or delete the endpoint and create it again",
)
#: Changes of the cache: what is right, and what is wrong.
CHANGES = (
    Change("to a claim", None, _EXISTING, *_MOVED),
    Change("from a claim", _EXISTING, None, *_MOVED),
    Change("from a claim to nothing said", _EXISTING, {"cache": None}, *_MOVED),
    Change("from the node to a claim", _NODE, _EXISTING, *_MOVED),
    Change("to another claim", _EXISTING, {"cache": {"persistentVolumeClaim": {"claimName": "others"}}}, *_MOVED),
    Change("to a claim that is made", _EXISTING, _sized("1Gi"), *_MOVED),
    Change("from a claim that is made", _sized("1Gi"), _NODE, *_MOVED),
    Change("the node, said at last", {"shmSize": "1Gi"}, _NODE),
    Change("the node, no longer said", {"cache": {"emptyDir": {"sizeLimit": "1Gi"}}}, None),
    Change("more of the node", _NODE, {"cache": {"emptyDir": {"sizeLimit": "1Gi"}}}),
    Change("less of the node, in memory", {"cache": {"emptyDir": {"sizeLimit": "2Gi"}}},
           {"cache": {"emptyDir": {"sizeLimit": "1Gi", "medium": "Memory"}}}),
    Change("growth", _sized("1Gi"), _sized("2Gi")),
    Change("growth across units", _sized("900Mi"), _sized("1e9")),
    Change("growth of a number", _sized(5), _sized("6")),
    Change("as much in other words", _sized("1Gi"), _sized("1024Mi")),
    Change("back to what it was", _sized("2Gi"), _sized("1Gi")),
    Change("other modes", _sized("1Gi"), claim("ReadWriteMany"), *_OTHERWISE),
    Change("a class", _sized("1Gi"), _sized("1Gi", storageClassName="fast"), *_OTHERWISE),
    Change("another class", _sized("1Gi", storageClassName="a"), _sized("9Gi", storageClassName="b"), *_OTHERWISE),
    Change("another volume", _sized("1Gi", volumeName="a"), _sized("1Gi", volumeName="b"), *_OTHERWISE),
    Change("no selector", _sized("1Gi", selector={"matchLabels": {"a": "b"}}), _sized("1Gi"), *_OTHERWISE),
    Change("a limit", _sized("1Gi"),
           _sized("", resources={"requests": {"storage": "1Gi"}, "limits": {"storage": "9Gi"}}), *_OTHERWISE),
    Change("another request", _sized("1Gi"),
           _sized("", resources={"requests": {"storage": "1Gi", "iops": "5"}}), *_OTHERWISE),
    Change("one request less", _sized("", resources={"requests": {"storage": "1Gi", "iops": "5"}}),
           _sized("1Gi"), *_OTHERWISE),
    Change("modes in another order", _sized("1Gi"),
           claim("ReadWriteOnce", "ReadWriteMany", resources={"requests": {"storage": "1Gi"}})),
    Change("attributes", _sized("1Gi", volumeAttributesClassName="a"), _sized("1Gi", volumeAttributesClassName="b")),
    Change("labels of the claim", _sized("1Gi"),
           {"cache": {"volumeClaimTemplate": {**_sized("1Gi")["cache"]["volumeClaimTemplate"],
                                              "metadata": {"labels": {"a": "b"}}}}}),
)  # fmt: skip


def generated(schema: Schema) -> Iterator[Wrong]:
    """Every field of the spec's `schema`, wrong in every way; each in a right spec that has the field."""
    seen = set()
    for right in RIGHT.values():
        for path, node in fields(schema, right):
            name = dotted(path, index=False)
            if name in seen:
                continue
            seen.add(name)
            for how, change in _faults(node, at(right, path)):
                wrong = copy.deepcopy(right)
                blamed = change(wrong, path)
                yield Wrong(f"{name} {how}", wrong, dotted(blamed))


def fields(schema: Schema, value: Any, path: Path = ()) -> Iterator[tuple[Path, Schema]]:
    """The fields that `value` has, with the schema of each."""
    if path:
        yield path, schema
    if "properties" in schema:
        for name in schema["properties"].keys() & value.keys():
            yield from fields(schema["properties"][name], value[name], (*path, name))
    elif "additionalProperties" in schema:
        for name in value:
            yield from fields(schema["additionalProperties"], value[name], (*path, name))
    elif "items" in schema:
        for index, item in enumerate(value):
            yield from fields(schema["items"], item, (*path, index))


def at(spec: Any, path: Path) -> Any:
    """What stands at `path`."""
    for step in path:
        spec = spec[step]
    return spec


def dotted(path: Path, *, index: bool = True) -> str:
    """`path` as both judges write it; without indices it names the field of the schema."""
    text = "spec"
    for step in path:
        text += f"[{step if index else ''}]" if isinstance(step, int) else f".{step}"
    return text


# A fault is done to a spec at a path, and returns the path to be blamed.
def _put(value: Any) -> Any:
    def change(spec: Spec, path: Path) -> Path:
        at(spec, path[:-1])[path[-1]] = value
        return path

    return change


def _remove(name: str) -> Any:
    def change(spec: Spec, path: Path) -> Path:
        del at(spec, path)[name]
        return (*path, name)

    return change


def _add(name: str) -> Any:
    def change(spec: Spec, path: Path) -> Path:
        at(spec, path)[name] = "x"
        return (*path, name)

    return change


def _faults(node: Schema, value: Any) -> Iterator[tuple[str, Any]]:
    """Every way to put a field wrong that holds `value`."""
    for kind, other in _OTHER_TYPES.items():
        types = node.get("type") or ("integer", "string")
        if kind not in types and not (kind == "integer" and types == "number"):
            yield f"is {kind}", _put(other)
    if "minimum" in node:
        yield "is too small", _put(node["minimum"] - 1)
    if "maximum" in node:
        yield "is too large", _put(node["maximum"] + 1)
    if "enum" in node:
        yield "is no such word", _put("no-such-word")
    if "pattern" in node:
        yield "has another pattern", _put(_mismatch(node["pattern"]))
    if node.get("minLength"):
        yield "is empty", _put("")
    if "maxLength" in node and "enum" not in node:
        yield "is too long", _put("a" * (node["maxLength"] + 1))
    if node.get("minItems"):
        yield "has no items", _put([])
    if "maxItems" in node:
        yield "has too many items", _put(list(_engines(value[0], node["maxItems"] + 1)))
    if "maxProperties" in node:
        filler = next(iter(value.values()))
        yield "has too many entries", _put({f"key-{number}": filler for number in range(node["maxProperties"] + 1)})
    if node.get("x-kubernetes-list-type") in ("map", "set"):
        yield "has something twice", _put([value[0], value[0]])
    for name in node.get("required", ()):
        yield f"lacks {name}", _remove(name)
    if "properties" in node:
        yield "has an unknown field", _add("noSuchField")


_OTHER_TYPES: dict[str, Any] = {
    "boolean": True,
    "integer": 7,
    "number": 1.5,
    "string": "text",
    "array": ["text"],
    "object": {"text": "text"},
}


def _mismatch(pattern: str) -> str:
    """Something that `pattern` does not match."""
    return next(text for text in ("!", " ", "\n") if not re.search(pattern, text))


def _engines(item: Any, count: int) -> Iterator[Any]:
    """So many items like `item`, no two the same."""
    for number in range(count):
        if isinstance(item, dict) and "name" in item:
            yield {**item, "name": f"n{number}"}
        else:
            yield f"{item}{number}" if isinstance(item, str) else copy.deepcopy(item)
