"""Where a pod keeps what it downloads."""

from __future__ import annotations

from typing import ClassVar, Literal

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import ObjectName, Part, Quantity
from stoker_operator.api.v1alpha1.claim import VolumeClaimTemplate


class EmptyDir(Part):
    """Space on the node, gone with the pod."""

    medium: Literal["", "Memory"] | None = None
    """Memory: in the node's memory, counted as the pod's. Absent: on the node's disk."""
    size_limit: Quantity | None = None
    """The most it may hold; a pod that stores more is evicted."""


class PersistentVolumeClaim(Part):
    """A claim of the endpoint's namespace, which must exist. It outlives the endpoint."""

    claim_name: ObjectName
    """Name of the claim. Several replicas share it, so it must allow being mounted by several pods."""


class Cache(Part):
    """Where downloaded and assembled weights are kept. Exactly one of the three, which stays what it is: neither is one
    turned into another, nor one claim into another."""

    empty_dir: EmptyDir | None = None
    """Space on the node, gone with the pod. This is what is used when storage is absent."""
    persistent_volume_claim: PersistentVolumeClaim | None = None
    """A claim that exists, so that weights are downloaded once."""
    volume_claim_template: VolumeClaimTemplate | None = None
    """A claim that is made for the endpoint, has its name and is deleted with it. All pods share it."""

    RULES: ClassVar = (
        Rule(
            field="",
            holds=lambda it: len(it.model_fields_set) == 1,
            cel="[has(self.emptyDir), has(self.persistentVolumeClaim), has(self.volumeClaimTemplate)]"
            ".filter(given, given).size() == 1",
            message="the cache is in one place",
            remedy="set one of emptyDir, persistentVolumeClaim and volumeClaimTemplate",
        ),
    )


class Storage(Part):
    """Storage of each pod."""

    cache: Cache | None = None
    """Where downloaded and assembled weights are kept; what may grow is its size. Absent: space on the node."""
    shm_size: Quantity | None = None
    """Size of /dev/shm, which is memory of the pod. Absent: 512Mi for each accelerator where a model is split, as much
    as is used under runtime vllm; else the container runtime's."""

    @property
    def cache_location(self) -> str:
        """Which place the cache is, however large: a claim that is made, one that exists, or space on the node."""
        if self.cache and self.cache.volume_claim_template:
            return "made"
        if self.cache and self.cache.persistent_volume_claim:
            return f"claim {self.cache.persistent_volume_claim.claim_name}"
        return "node"
