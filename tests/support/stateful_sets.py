"""A workload kind that exists only in tests: each replica has two pods, a leader and a worker, in separate
StatefulSets.

Endpoints of this kind have two workloads: ``main`` serves, ``prefill`` supports it. An annotation of the pods
(`PREFILL_SEQUENCES`) applies only to ``prefill``, like a section of the spec would.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.objects.facts import MAIN, Child, Object, PodCounts, Rollout
from stoker_operator.objects.owner import COMPONENT, Manifest, Owner
from stoker_operator.workloads.composition import Composition, Role, Workload
from stoker_operator.workloads.kind import PodSet, Resource, WorkloadKind

#: The components of a workload; the leader receives the requests.
LEADER, WORKER = "leader", "worker"
#: The annotation of the pods that sets ``engine.maxNumSeqs`` of the workload ``prefill``.
PREFILL_SEQUENCES: Final = "test/prefill-max-num-seqs"
PREFILL: Final = "prefill"


class StatefulSetPair(WorkloadKind):
    """Two StatefulSets per workload; a replica is one pod of each."""

    resource: ClassVar = Resource("StatefulSet", "apps", "v1", "statefulsets")

    def objects(self, pods: PodSet, live: Mapping[Child, Object]) -> tuple[Manifest, ...]:
        return tuple(self._stateful_set(pods, component) for component in (LEADER, WORKER))

    def _stateful_set(self, pods: PodSet, component: str) -> Manifest:
        owner = pods.owner.of(pods.owner.workload, component)
        template = copy.deepcopy(pods.template)
        template["metadata"]["labels"] |= owner.labels()
        return {
            "apiVersion": self.resource.api_version,
            "kind": self.resource.kind,
            "metadata": self.metadata(owner),
            "spec": {
                "replicas": pods.replicas,
                "serviceName": owner.name,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": owner.selector()},
                "template": template,
            },
        }

    def templates(self, body: Object) -> tuple[Manifest, ...]:
        template = body.get("spec", {}).get("template")
        return (template,) if template else ()

    def with_templates(self, body: Manifest, templates: Sequence[Manifest]) -> Manifest:
        (template,) = templates
        return {**body, "spec": {**body["spec"], "template": template}}

    def rollout(self, objects: Sequence[Object]) -> Rollout:
        statuses: list[Any] = [each.get("status") or {} for each in objects]

        def least(name: str) -> int:
            return min(status.get(name, 0) for status in statuses) if len(statuses) == 2 else 0

        desired: int = objects[0]["spec"]["replicas"]
        is_current = all(
            each["metadata"]["generation"] <= status.get("observedGeneration", 0)
            for each, status in zip(objects, statuses, strict=True)
        )
        total = sum(status.get("replicas", 0) for status in statuses)
        ready = sum(status.get("readyReplicas", 0) for status in statuses)
        return Rollout(
            current=is_current and len(objects) == 2,
            desired=desired,
            total=max(status.get("replicas", 0) for status in statuses),
            updated=least("updatedReplicas"),
            ready=least("readyReplicas"),
            available=least("availableReplicas"),
            pods=PodCounts(desired=2 * desired, total=total, ready=ready),
        )

    def has_served(self, live: Object) -> bool:
        return bool((live.get("status") or {}).get("readyReplicas"))

    def pod_version(self, pod: Object, objects: Sequence[Object]) -> str:
        labels: Any = pod["metadata"]["labels"]
        revision = str(labels.get("controller-revision-hash", ""))
        mine: list[Any] = [each for each in objects if each["metadata"]["labels"][COMPONENT] == labels[COMPONENT]]
        is_newest = any((each.get("status") or {}).get("updateRevision") == revision for each in mine)
        return "newest" if is_newest else revision

    def selects(self, owner: Owner, live: Object) -> bool:
        is_component = owner.component in (LEADER, WORKER)
        return is_component and bool(live["spec"]["selector"].get("matchLabels") == owner.selector())

    def request_pods(self, owner: Owner) -> dict[str, str]:
        return owner.of(owner.workload, LEADER).selector()


PAIR: Final = StatefulSetPair()


def two_workloads(spec: Spec) -> tuple[Workload, ...]:
    """Return the serving workload, and prefill's, to which the annotation applies."""
    metadata = spec.template.metadata
    annotations = dict(metadata.annotations or {})
    sequences = annotations.pop(PREFILL_SEQUENCES, None)
    bare = metadata.model_copy(update={"annotations": annotations or None})
    main = spec.model_copy(update={"template": spec.template.model_copy(update={"metadata": bare})})
    changed = {"max_num_seqs": int(sequences)} if sequences else {}
    prefill = main.model_copy(update={"engine": main.engine.model_copy(update=changed)})
    return Workload(MAIN, main, PAIR), Workload(PREFILL, prefill, PAIR, Role.SUPPORTING)


#: Endpoints with `two_workloads`.
TWO_PAIRS: Final = Composition((PAIR,), two_workloads)
