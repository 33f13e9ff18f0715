"""Volumes of the pods: the cache, and shared memory."""

from __future__ import annotations

from typing import ClassVar, Literal

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import ObjectName, Part, Quantity
from stoker_operator.api.v1alpha1.claim import VolumeClaimTemplate


class EmptyDir(Part):
    """Space on the node, which is deleted with the pod."""

    medium: Literal["", "Memory"] | None = None
    """Memory: in memory, which counts towards the pod's memory limit. Absent or "": the node's default, usually its
    disk."""
    size_limit: Quantity | None = None
    """Maximum size. A pod that stores more on disk is evicted."""


class PersistentVolumeClaim(Part):
    """An existing claim in the endpoint's namespace."""

    claim_name: ObjectName
    """Name of the claim. It must have access mode ReadWriteMany if there may be several pods, also during a
    roll-out."""


class Cache(Part):
    """The engine's cache, for example of downloaded weights."""

    empty_dir: EmptyDir | None = None
    """Space on the node, which is deleted with the pod. This is the default if storage.cache is absent."""
    persistent_volume_claim: PersistentVolumeClaim | None = None
    """An existing claim in the endpoint's namespace. It is not deleted with the endpoint."""
    volume_claim_template: VolumeClaimTemplate | None = None
    """Template of a claim that the operator creates with the endpoint's name. All pods share it; it is deleted with the
    endpoint."""

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
    """Volumes of the pods: the cache, and shared memory."""

    cache: Cache | None = None
    """The engine's cache, for example of downloaded weights. Exactly one field must be set. The kind of volume and the
    name of an existing claim cannot be changed later; volumeClaimTemplate lists what can. Absent: space on the node."""
    shm_size: Quantity | None = None
    """Maximum size of /dev/shm, whose content counts towards the pod's memory. Absent: with runtime vllm, limited by
    the pod's memory only; else 512Mi for each accelerator if engines use several, or the container runtime's
    default."""

    @property
    def cache_location(self) -> str:
        """Identity of the cache's volume, regardless of its size: a created claim, an existing one, or space on the
        node."""
        if self.cache and self.cache.volume_claim_template:
            return "made"
        if self.cache and self.cache.persistent_volume_claim:
            return f"claim {self.cache.persistent_volume_claim.claim_name}"
        return "node"
