"""Specs that break a rule of the API: one or more per rule, written by hand."""

from __future__ import annotations

from .spec_cases import (
    COMPARES_WITH_NOTHING,
    CPU,
    DEMO,
    GPUS,
    METADATA,
    WRONG_KEY,
    WRONG_KEYS,
    Wrong,
    claim,
    labelled_claim,
    spec,
)

_FOUR = "tensor × data must be 4 (4 × 1, 2 × 2 or 1 × 4)"
_ONE_POD = (
    "the claim is for one node, but there may be two pods; use access mode ReadWriteMany, or replicas 1 with rollout"
)
_ONE_SCALED_POD = _ONE_POD.replace("replicas 1", "scaling.maxReplicas 1")
_NO_SINGLE_POD = "the claim is for one node, but there may be two pods; use access mode ReadWriteMany"
_NEVER_EXCEEDED = (
    "a replica never runs more requests than engine.maxNumSeqs for each of its engines, so no replica would ever be "
    "added; lower target, or raise engine.maxNumSeqs"
)
_RUNNING = {"maxReplicas": 2, "metric": "runningRequests"}
#: Specs that break a rule, one or more per rule.
RULE_BREAKERS = (
    *(
        Wrong(
            f"a target of {target}",
            spec(scaling={"maxReplicas": 2, "target": target}),
            "spec.scaling.target",
            "the target is too small: it is the average of metric per replica; use 0.01 or more",
        )
        for target in (0, 0.001, -1)
    ),
    Wrong(
        "maxReplicas below minReplicas",
        spec(scaling={"minReplicas": 3, "maxReplicas": 2, "target": 4}),
        "spec.scaling.minReplicas",
        "minReplicas is above maxReplicas; lower minReplicas, or raise maxReplicas",
    ),
    Wrong(
        "a fraction of the cache that is never exceeded",
        spec(scaling={"maxReplicas": 2, "metric": "kvCacheUsage", "target": 1}),
        "spec.scaling.target",
        "the KV cache's usage is a fraction and never exceeds 1, so no replica would ever be added; use a fraction",
    ),
    Wrong(
        "a percentage of the cache as target",
        spec(scaling={"maxReplicas": 2, "metric": "kvCacheUsage", "target": 80}),
        "spec.scaling.target",
        "the KV cache's usage is a fraction and never exceeds 1",
    ),
    *(
        Wrong(
            f"an idle time without zero, {name}",
            spec(scaling={"maxReplicas": 2, "target": 4, "idleSecondsToZero": 60, **fewest}),
            "spec.scaling.idleSecondsToZero",
            "an endpoint with minReplicas above 0 is never scaled to zero; set minReplicas to 0, or remove",
        )
        for name, fewest in (("implied", {}), ("explicit", {"minReplicas": 1}))
    ),
    *(
        Wrong(
            f"running requests that are never exceeded: {name}",
            spec(engine={"maxNumSeqs": 8}, scaling={**_RUNNING, "target": target}, **parts),
            "spec.scaling.target",
            _NEVER_EXCEEDED,
        )
        for name, target, parts in (
            ("one engine", 8, {}),
            ("one engine of many accelerators", 8, {"hardware": GPUS}),
            ("two engines", 16, {"hardware": GPUS, "parallelism": {"data": 2}}),
            ("engines of two nodes", 32, {"hardware": {**GPUS, "nodes": 2}, "parallelism": {"tensor": 2}}),
            ("as many engines as accelerators", 32, {"hardware": GPUS, "parallelism": {"mode": "Auto"}}),
            ("engines on a cpu", 16, {"parallelism": {"data": 2, "tensor": 2}}),
        )
    ),
    Wrong(
        "a cache that two scaled replicas need",
        spec(
            scaling={"maxReplicas": 2, "target": 4},
            storage=claim("ReadWriteOnce"),
            rollout={"maxSurge": 0, "maxUnavailable": 1},
        ),
        "spec.storage.cache",
        _ONE_SCALED_POD,
    ),
    Wrong(
        "a cache that two pods of one scaled replica need while they roll",
        spec(scaling={"maxReplicas": 1, "target": 4}, storage=claim("ReadWriteOnce")),
        "spec.storage.cache",
        _ONE_SCALED_POD,
    ),
    Wrong(
        "sizes for too many GPUs",
        spec(hardware=GPUS, parallelism={"tensor": 2, "data": 4}),
        "spec.parallelism",
        f"tensor (2) × data (4) needs 8 GPUs, 4 available; {_FOUR}, or hardware.count 8",
    ),
    Wrong(
        "sizes for too many GPUs with a pipeline",
        spec(hardware=GPUS, parallelism={"tensor": 2, "data": 2, "pipeline": 2}),
        "spec.parallelism",
        "tensor (2) × data (2) × pipeline (2) needs 8 GPUs, 4 available; tensor × data must be 2 (2 × 1 or 1 × 2), or "
        "hardware.count 8",
    ),
    Wrong(
        "sizes that leave one GPU idle",
        spec(hardware=GPUS, parallelism={"tensor": 3, "data": 1}),
        "spec.parallelism",
        f"tensor (3) × data (1) uses 3 of 4 GPUs, 1 would be idle; {_FOUR}, or hardware.allowIdle true",
    ),
    Wrong(
        "sizes that leave three GPUs idle",
        spec(hardware=GPUS, parallelism={"tensor": 1, "data": 1}),
        "spec.parallelism",
        f"tensor (1) × data (1) uses 1 of 4 GPUs, 3 would be idle; {_FOUR}, or hardware.allowIdle true",
    ),
    Wrong(
        "sizes that leave a GPU idle, with allowIdle false",
        spec(hardware={**GPUS, "allowIdle": False}, parallelism={"tensor": 3}),
        "spec.parallelism",
        f"tensor (3) × data (1) uses 3 of 4 GPUs, 1 would be idle; {_FOUR}",
    ),
    Wrong(
        "sizes for too many GPUs, with allowIdle true",
        spec(hardware={**GPUS, "allowIdle": True}, parallelism={"tensor": 8}),
        "spec.parallelism",
        f"tensor (8) × data (1) needs 8 GPUs, 4 available; {_FOUR}",
    ),
    Wrong(
        "tensor that does not divide the GPUs",
        spec(hardware={**GPUS, "count": 8}, parallelism={"tensor": 3}),
        "spec.parallelism",
        "tensor (3) × data (2) uses 6 of 8 GPUs, 2 would be idle; tensor × data must be 8 (8 × 1, 4 × 2",
    ),
    Wrong(
        "data that does not divide the GPUs",
        spec(hardware=GPUS, parallelism={"data": 3}),
        "spec.parallelism",
        f"tensor (1) × data (3) uses 3 of 4 GPUs, 1 would be idle; {_FOUR}",
    ),
    Wrong(
        "data above the number of GPUs",
        spec(hardware=GPUS, parallelism={"data": 8}),
        "spec.parallelism",
        f"tensor (1) × data (8) needs 8 GPUs, 4 available; {_FOUR}, or hardware.count 8",
    ),
    Wrong(
        "a pipeline that does not divide the GPUs",
        spec(hardware=GPUS, parallelism={"pipeline": 3}),
        "spec.parallelism",
        "tensor (1) × data (1) × pipeline (3) uses 3 of 4 GPUs, 1 would be idle; pipeline must divide 4 (1, 2 or 4)",
    ),
    Wrong(
        "sizes beyond any node",
        spec(hardware={"accelerator": "nvidia-l4"}, parallelism={"tensor": 128, "data": 128, "pipeline": 128}),
        "spec.parallelism",
        "tensor (128) × data (128) × pipeline (128) needs 2097152 GPUs, 1 available; pipeline must divide 1 (1)",
    ),
    Wrong(
        "sizes for too many GPUs on two nodes",
        spec(hardware={**GPUS, "nodes": 2}, parallelism={"tensor": 4, "data": 4}),
        "spec.parallelism",
        "tensor (4) × data (4) needs 16 GPUs, 8 available; tensor must be at most 4, and tensor × data 8",
    ),
    Wrong(
        "sizes that leave GPUs idle on two nodes with one stage each",
        spec(hardware={**GPUS, "nodes": 2}, parallelism={"tensor": 2, "data": 1, "pipeline": 2}),
        "spec.parallelism",
        "tensor (2) × data (1) × pipeline (2) uses 4 of 8 GPUs, 4 would be idle; tensor must be at most 4, and "
        "tensor × data 4, or hardware.allowIdle true",
    ),
    Wrong(
        "tensor beyond a node",
        spec(hardware={**GPUS, "nodes": 2}),
        "spec.parallelism",
        "tensor (absent: all accelerators that pipeline and data leave) is more than the accelerators of a pod; set "
        "mode: Auto, or tensor to at most hardware.count, with pipeline or data for the other nodes",
    ),
    Wrong(
        "too many nodes",
        spec(hardware={**GPUS, "count": 64, "nodes": 3}),
        "spec.hardware.nodes",
        "count × nodes is more than 128, the maximum number of accelerators of a replica; lower one of them",
    ),
    Wrong(
        "a split model on a cpu by another runtime",
        spec(parallelism={"tensor": 2}, engine={"runtime": "vllm"}),
        "spec.parallelism",
        "on accelerator cpu, a runtime other than stoker runs a single engine of one process; remove parallelism, "
        "and use spec.replicas for more engines, or use runtime: stoker",
    ),
    Wrong(
        "more ranks than the maximum on a cpu",
        spec(parallelism={"tensor": 3, "data": 11, "pipeline": 2}),
        "spec.parallelism",
        "tensor × pipeline × data is more than 64, the maximum number of ranks of a pod; lower one of them",
    ),
    *(
        Wrong(
            f"{size} with mode Auto",
            spec(hardware=GPUS, parallelism={"mode": "Auto", size: 4 if size != "pipeline" else 1}),
            "spec.parallelism.mode",
            f"mode Auto chooses {size}, but {size} is also set; remove mode or {size}",
        )
        for size in ("tensor", "data", "pipeline", "expert")
    ),
    Wrong(
        "experts on a cpu by another runtime",
        spec(parallelism={"expert": 2}, engine={"runtime": "vllm"}),
        "spec.parallelism",
        "on accelerator cpu, a runtime other than stoker runs a single engine of one process; remove parallelism",
    ),
    Wrong(
        "a count of cpus",
        spec(hardware={**CPU, "count": 2}),
        "spec.hardware.count",
        "count must be 1 on accelerator cpu; remove count, and size the pod with spec.hardware.resources",
    ),
    Wrong(
        "a cpu on two nodes",
        spec(hardware={**CPU, "nodes": 2}),
        "spec.hardware.nodes",
        "accelerator cpu does not span nodes; remove nodes, and use spec.replicas",
    ),
    Wrong(
        "an unknown scheme of the source",
        spec(model={"source": "s3://bucket"}),
        "spec.model.source",
        "the value is not a model source; use hf://",
    ),
    Wrong(
        "a hub name without an organization",
        spec(model={"source": "hf://name"}),
        "spec.model.source",
        "the value is not a model source; use hf://",
    ),
    Wrong(
        "an unknown demo model",
        spec(model={"source": "demo://other"}),
        "spec.model.source",
        "there is no such demo model; use demo://gemma-3-270m",
    ),
    Wrong(
        "a path out of the claim",
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
        "an empty chatTemplate",
        spec(model={**DEMO, "chatTemplate": {}}),
        "spec.model.chatTemplate",
        "a chat template has exactly one source; set either value or configMapKeyRef",
    ),
    Wrong(
        "two chat templates",
        spec(model={**DEMO, "chatTemplate": {"value": "x", "configMapKeyRef": {"name": "a", "key": "b"}}}),
        "spec.model.chatTemplate",
        "a chat template has exactly one source; set either value or configMapKeyRef",
    ),
    Wrong(
        "an empty cache",
        spec(storage={"cache": {}}),
        "spec.storage.cache",
        "the cache has exactly one volume; set one of emptyDir, persistentVolumeClaim and volumeClaimTemplate",
    ),
    Wrong(
        "a cache with two volumes",
        spec(storage={"cache": {"emptyDir": {}, "persistentVolumeClaim": {"claimName": "a"}}}),
        "spec.storage.cache",
        "the cache has exactly one volume; set one of emptyDir, persistentVolumeClaim and volumeClaimTemplate",
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
        _NO_SINGLE_POD,
    ),
    Wrong(
        "a claim without a size",
        spec(
            storage={
                "cache": {
                    "volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {}}}}
                }
            }
        ),
        "spec.storage.cache.volumeClaimTemplate.spec.resources.requests",
        "a claim must request storage; set requests.storage, for example to 100Gi",
    ),
    Wrong(
        "a rollout without surge and unavailable pods",
        spec(rollout={"maxSurge": 0}),
        "spec.rollout",
        "maxSurge 0 and maxUnavailable 0 leave no way to replace a pod; set maxUnavailable to 1, or maxSurge to 1",
    ),
    Wrong(
        "a rollout without surge and unavailable pods, in percent",
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
        "a variable without a source",
        spec(engine={"env": [{"name": "A", "valueFrom": {}}]}),
        "spec.engine.env[0].valueFrom",
        "a value has exactly one source; set one of secretKeyRef, configMapKeyRef, fieldRef, resourceFieldRef and file",
    ),
    Wrong(
        "a reserved label of the pods",
        spec(template={"metadata": {"labels": {"app.kubernetes.io/instance": "x"}}}),
        "spec.template.metadata.labels",
        "one of the labels is reserved: the operator selects the pods by it; use labels other than app.",
    ),
    Wrong(
        "a reserved label of the Service",
        spec(service={"labels": {"app.kubernetes.io/managed-by": "x"}}),
        "spec.service.labels",
        "one of the labels is reserved: the operator selects the Service by it; use labels other than app.",
    ),
    Wrong(
        "a reserved label of the claim",
        spec(storage=labelled_claim({"labels": {"a": "b", "stoker.dev/workload": "x"}})),
        "spec.storage.cache.volumeClaimTemplate.metadata.labels",
        "one of the labels is reserved: the operator selects the claim by it; use labels other than app.",
    ),
    *(
        Wrong(f"{field} {key[:20]!r} of {name}", make(field, {"fine": "a", key: "a"}), f"{path}.{field}", WRONG_KEY)
        for (name, path, make), keys in zip(METADATA, WRONG_KEYS, strict=True)
        for field, key in zip(("labels", "annotations"), keys, strict=True)
    ),
    Wrong(
        "a pod selector with an invalid label",
        spec(networkPolicy={"from": [{"podSelector": {"matchLabels": {"a b": "c"}}}]}),
        "spec.networkPolicy.from[0].podSelector.matchLabels",
        WRONG_KEY,
    ),
    Wrong(
        "a namespace selector with an invalid label",
        spec(networkPolicy={"from": [{"namespaceSelector": {"matchLabels": {"A.b/c": "c"}}}]}),
        "spec.networkPolicy.from[0].namespaceSelector.matchLabels",
        WRONG_KEY,
    ),
    Wrong(
        "a volume selector with an invalid label",
        spec(storage=claim("ReadWriteMany", selector={"matchLabels": {"a/": "c"}})),
        "spec.storage.cache.volumeClaimTemplate.spec.selector.matchLabels",
        WRONG_KEY,
    ),
    Wrong(
        "a load balancer in mode Namespace",
        spec(service={"type": "LoadBalancer"}),
        "spec.networkPolicy",
        "a Service of type NodePort or LoadBalancer is for clients that mode Namespace keeps out; set networkPolicy.",
    ),
    Wrong(
        "a node port in mode Namespace",
        spec(service={"type": "NodePort"}, networkPolicy={"mode": "Namespace"}),
        "spec.networkPolicy",
        "a Service of type NodePort or LoadBalancer is for clients that mode Namespace keeps out; set networkPolicy.",
    ),
    *(
        Wrong(
            f"a header that identifies no session: {header}",
            spec(routing={"sessionHeader": header}),
            "spec.routing.sessionHeader",
            "the header cannot identify a session: it is removed from requests, or describes the connection",
        )
        for header in ("x-stoker-session", "X-Gateway-A", "x-Envoy-retry", "HOST", "Connection", "te")
    ),
    Wrong(
        "mode Open with additional senders",
        spec(networkPolicy={"mode": "Open", "from": [{"podSelector": {}}]}),
        "spec.networkPolicy.from",
        "from requires mode Namespace",
    ),
    Wrong(
        "an empty peer",
        spec(networkPolicy={"from": [{"podSelector": {}}, {}]}),
        "spec.networkPolicy.from[1]",
        "a peer is either pods or addresses; set podSelector, namespaceSelector or both, or set ipBlock alone",
    ),
    Wrong(
        "a peer with pods and addresses",
        spec(networkPolicy={"from": [{"podSelector": {}, "ipBlock": {"cidr": "10.0.0.0/8"}}]}),
        "spec.networkPolicy.from[0]",
        "a peer is either pods or addresses; set podSelector, namespaceSelector or both, or set ipBlock alone",
    ),
    *(
        Wrong(
            f"an invalid network: {cidr}",
            spec(networkPolicy={"from": [{"ipBlock": {"cidr": cidr}}]}),
            "spec.networkPolicy.from[0].ipBlock.cidr",
            "the value is not a network; use one such as 10.0.0.0/8",
        )
        for cidr in ("10.0.0.1/8", "10.0.0.0/33", "10.0.0/8", "010.0.0.0/8", "::ffff:0:0/96", "1::2::3/64", "::1/64")
    ),
    Wrong(
        "an invalid network among the excluded ones",
        spec(networkPolicy={"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16", "10.1.0.1/16"]}}]}),
        "spec.networkPolicy.from[0].ipBlock.except",
        "an excluded range is not a network; use networks such as 10.1.0.0/16",
    ),
    *(
        Wrong(
            f"an excluded network outside cidr: {inner}",
            spec(networkPolicy={"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": [inner]}}]}),
            "spec.networkPolicy.from[0].ipBlock.except",
            "an excluded range is not inside cidr; use networks that cidr contains",
        )
        for inner in ("10.0.0.0/8", "11.0.0.0/16", "0.0.0.0/0", "2001:db8::/32")
    ),
    *(
        Wrong(
            f"operator {operator} with values {values}",
            spec(
                networkPolicy={
                    "from": [{"podSelector": {"matchExpressions": [{"key": "a", "operator": operator, **values}]}}]
                }
            ),
            "spec.networkPolicy.from[0].podSelector.matchExpressions[0].values",
            "In and NotIn need values, Exists and DoesNotExist do not allow them; set values, or remove them",
        )
        for operator, values in (("In", {}), ("NotIn", {"values": []}), ("Exists", {"values": ["b"]}))
    ),
    *(
        Wrong(
            f"{where} with operator In and no values",
            change,
            f"spec.{where}.matchExpressions[0].values",
            "In and NotIn need values, Exists and DoesNotExist do not allow them; set values, or remove them",
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
