"""Storage of a pod: the cache for weights, and shared memory."""

from __future__ import annotations

from typing import ClassVar, Literal

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import ObjectName, Part, Quantity
from stoker_operator.api.v1alpha1.claim import VolumeClaimTemplate


class EmptyDir(Part):
    """Space on the node, which is deleted with the pod."""

    medium: Literal["", "Memory"] | None = None
    """Memory: in memory, which counts towards the pod's limit. Absent: on the node's disk."""
    size_limit: Quantity | None = None
    """Maximum size; a pod that stores more is evicted."""


class PersistentVolumeClaim(Part):
    """An existing claim in the endpoint's namespace. It is not deleted with the endpoint."""

    claim_name: ObjectName
    """Name of the claim. Several replicas share it, so its access mode must allow several pods to mount it."""


class Cache(Part):
    """Cache for downloaded and assembled weights. Exactly one field must be set. The kind of volume and the claim
    cannot be changed later."""

    empty_dir: EmptyDir | None = None
    """Space on the node, which is deleted with the pod. This is the default if storage is absent."""
    persistent_volume_claim: PersistentVolumeClaim | None = None
    """An existing claim. Weights are downloaded once."""
    volume_claim_template: VolumeClaimTemplate | None = None
    """Template of a claim that the operator creates with the endpoint's name and deletes with the endpoint. All pods
    share it."""

    RULES: ClassVar = (
        Rule(
            field="",
            holds=lambda it: len(it.model_fields_set) == 1,
            cel="[has(self.emptyDir), has(self.persistentVolumeClaim), has(self.volumeClaimTemplate)]"
            ".filter(given, given).size() == 1",
            message="the cache has exactly one volume",
            remedy="set one of emptyDir, persistentVolumeClaim and volumeClaimTemplate",
        ),
    )


class Storage(Part):
    """Storage of each pod."""

    cache: Cache | None = None
    """Cache for downloaded and assembled weights. Only its size can be changed later. Absent: space on the node."""
    shm_size: Quantity | None = None
    """Size of /dev/shm, which counts towards the pod's memory. Absent: with runtime vllm, limited by the pod's memory
    only; else 512Mi for each accelerator if a model is split, or the container runtime's default."""

    @property
    def cache_location(self) -> str:
        """Identity of the cache's volume, regardless of its size: a created claim, an existing one, or space on the
        node."""
        if self.cache and self.cache.volume_claim_template:
            return "made"
        if self.cache and self.cache.persistent_volume_claim:
            return f"claim {self.cache.persistent_volume_claim.claim_name}"
        return "node"
