"""Where a pod keeps what it downloads."""

from __future__ import annotations

from typing import ClassVar

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import ObjectName, Part, Quantity


class EmptyDir(Part):
    """Space on the node, gone with the pod."""

    size_limit: Quantity | None = None
    """The most it may hold; a pod that stores more is evicted."""


class PersistentVolumeClaim(Part):
    """A claim of the endpoint's namespace, which must exist. It outlives the endpoint."""

    claim_name: ObjectName
    """Name of the claim. Several replicas share it, so it must allow being mounted by several pods."""


class Cache(Part):
    """Where downloaded and assembled weights are kept. Exactly one of the two."""

    empty_dir: EmptyDir | None = None
    """Space on the node, gone with the pod. This is what is used when storage is absent."""
    persistent_volume_claim: PersistentVolumeClaim | None = None
    """A claim that exists, so that weights are downloaded once."""

    RULES: ClassVar = (
        Rule(
            field="",
            holds=lambda it: (it.empty_dir is None) != (it.persistent_volume_claim is None),
            cel="has(self.emptyDir) != has(self.persistentVolumeClaim)",
            message="the cache is in one place",
            remedy="set either emptyDir or persistentVolumeClaim",
        ),
    )


class Storage(Part):
    """Storage of each pod."""

    cache: Cache | None = None
    """Where downloaded and assembled weights are kept. Absent: space on the node."""
