"""The volumes of a pod. The engine's root file system is read-only, so the engine writes only to volumes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from stoker_common.model_source import PVC_MOUNT, ModelSource
from stoker_operator.api.quantity import amount
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.v1alpha1.claim import SHARED
from stoker_operator.api.violation import Violation
from stoker_operator.objects.owner import Manifest, Owner
from stoker_operator.plan.placement import Placement

CACHE_MOUNT: Final = "/cache"
TEMPLATE_MOUNT: Final = "/etc/stoker/chat-template"
TEMPLATE_FILE: Final = "template.jinja"
API_KEYS_MOUNT: Final = "/etc/stoker/api-keys"

#: Variables that direct programs to the writable cache.
CACHE_ENV: Final = {
    "HOME": CACHE_MOUNT,
    "XDG_CACHE_HOME": CACHE_MOUNT,
    "HF_HOME": f"{CACHE_MOUNT}/huggingface",
}


#: Size limit of /dev/shm for each accelerator, in MiB. NCCL uses some tens (4 MiB per channel and peer); unused space
#: takes no memory.
_SHM_MIB: Final = 512


@dataclass(frozen=True)
class Volume:
    """A volume and its mount path in the engine's container."""

    name: str
    mount: str
    source: Manifest
    read_only: bool = False

    def volume(self) -> Manifest:
        """Return the entry of the pod's ``volumes``."""
        return {"name": self.name, **self.source}

    def volume_mount(self) -> Manifest:
        """Return the entry of the container's ``volumeMounts``."""
        mount: Manifest = {"name": self.name, "mountPath": self.mount}
        return mount | {"readOnly": True} if self.read_only else mount


def volumes(owner: Owner, spec: Spec, placement: Placement, *, api_keys: bool, shm: bool) -> list[Volume]:
    """Return the volumes that the pods of `spec` need.

    Args:
        owner: the endpoint.
        spec: its spec.
        placement: the model's placement in a pod.
        api_keys: whether the runtime reads the API keys from files.
        shm: whether the runtime needs an unknown amount of shared memory even if the model is not split.
    """
    needed = [Volume("cache", CACHE_MOUNT, _cache(owner, spec)), Volume("tmp", "/tmp", {"emptyDir": {}})]
    memory = _shm(spec, placement, of_any_size=shm)
    if memory:
        needed.append(Volume("shm", "/dev/shm", memory))
    source = ModelSource.parse(spec.model.source)
    if source.scheme == "pvc":
        claim = {"persistentVolumeClaim": {"claimName": source.name, "readOnly": True}}
        needed.append(Volume("model", PVC_MOUNT, claim, read_only=True))
    template = spec.model.chat_template
    if template and template.config_map_key_ref:
        ref = template.config_map_key_ref
        config_map = {"configMap": {"name": ref.name, "items": [{"key": ref.key, "path": TEMPLATE_FILE}]}}
        needed.append(Volume("chat-template", TEMPLATE_MOUNT, config_map, read_only=True))
    if spec.auth and api_keys:
        # Only root and the pod's fsGroup can read the keys.
        secret = {"secret": {"secretName": spec.auth.api_keys_secret_ref.name, "defaultMode": 0o440}}
        needed.append(Volume("api-keys", API_KEYS_MOUNT, secret, read_only=True))
    return needed


def claim(owner: Owner, spec: Spec) -> Manifest | None:
    """Return the PersistentVolumeClaim that the spec describes, if any."""
    template = spec.storage.cache.volume_claim_template if spec.storage.cache else None
    if template is None:
        return None
    metadata = owner.metadata()
    metadata["labels"] = {**(template.metadata.labels or {}), **metadata["labels"]}
    if template.metadata.annotations:
        metadata["annotations"] = dict(template.metadata.annotations)
    claim_spec = template.spec.model_dump(by_alias=True, exclude_none=True)
    for amounts in claim_spec["resources"].values():
        amounts.update({name: str(amount) for name, amount in amounts.items()})
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": claim_spec}


def shrinking_problem(spec: Spec, live: Mapping[str, Any] | None) -> Violation | None:
    """Return a violation if the existing claim's request cannot be lowered to the size in `spec`; otherwise None.

    After a failed expansion, Kubernetes allows a claim's request to be lowered, but only to more than its capacity. So
    the size is compared with the capacity, and not with an earlier spec.
    """
    template = spec.storage.cache.volume_claim_template if spec.storage.cache else None
    has = ((live or {}).get("status") or {}).get("capacity", {}).get("storage")
    if template is None or live is None or has is None:
        return None
    size = amount(template.spec.resources.requests["storage"])
    requested = live["spec"]["resources"]["requests"]["storage"]  # the volume may be larger
    if size >= amount(requested) or size > amount(has):
        return None
    return Violation(
        "spec.storage.cache.volumeClaimTemplate.spec.resources.requests",
        f"a volume cannot shrink, and this one has {has}",
        f"request more than {has}" if amount(requested) > amount(has) else f"request at least {requested}",
        reason="Immutable",
    )


class NamedClaim(NamedTuple):
    """An existing claim that a spec names.

    Attributes:
        field: path of the spec's field that names it.
        name: the claim's name.
        shared_by: the access modes with which pods on several nodes can use it.
    """

    field: str
    name: str
    shared_by: tuple[str, ...]


def named_claims(spec: Spec) -> list[NamedClaim]:
    """Return the claims that `spec` names: its model's, which is only read, and its cache's."""
    claims = []
    source = ModelSource.parse(spec.model.source)
    if source.scheme == "pvc":
        claims.append(NamedClaim("spec.model.source", source.name, (SHARED, "ReadOnlyMany")))
    cache = spec.storage.cache
    if cache and cache.persistent_volume_claim:
        name = cache.persistent_volume_claim.claim_name
        claims.append(NamedClaim("spec.storage.cache.persistentVolumeClaim", name, (SHARED,)))
    return claims


def sharing_problem(spec: Spec, access_modes: Mapping[str, Collection[str]]) -> Violation | None:
    """Return why the pods of `spec` cannot share a claim that it names, or None if they can, need not, or this is
    unknown.

    ReadWriteOnce lets pods of one node share a volume, but an endpoint's pods may run on several nodes.

    Args:
        spec: the endpoint's spec.
        access_modes: access modes of existing claims, by name; other claims are not checked.
    """
    if not spec.has_two_pods:
        return None
    for claim in named_claims(spec):
        modes = access_modes.get(claim.name)
        if modes is None or set(modes) & set(claim.shared_by):
            continue
        return Violation(
            claim.field,
            f"claim {claim.name} allows {', '.join(modes) or 'nothing'} only, and there may be two pods at a time",
            f"use a claim that allows {' or '.join(claim.shared_by)}{f', or {spec.one_pod}' if spec.one_pod else ''}",
            reason="VolumeNotShared",
        )
    return None


def _shm(spec: Spec, placement: Placement, *, of_any_size: bool) -> Manifest | None:
    """Return the source of /dev/shm, or None for the container's default of 64 MiB.

    The accelerators of an engine use it for NCCL's buffers; ranks on CPUs do not use it.
    """
    size = spec.storage.shm_size
    if size is not None:
        return {"emptyDir": {"medium": "Memory", "sizeLimit": str(size)}}
    if of_any_size:
        return {"emptyDir": {"medium": "Memory"}}
    if placement.accelerator.resource is None or placement.tensor * placement.pipeline == 1:
        return None
    return {"emptyDir": {"medium": "Memory", "sizeLimit": f"{placement.sizes.used * _SHM_MIB}Mi"}}


def _cache(owner: Owner, spec: Spec) -> Manifest:
    cache = spec.storage.cache
    if cache and cache.volume_claim_template:
        return {"persistentVolumeClaim": {"claimName": owner.object_name}}
    if cache and cache.persistent_volume_claim:
        return {"persistentVolumeClaim": {"claimName": cache.persistent_volume_claim.claim_name}}
    empty_dir: Manifest = {}
    if cache and cache.empty_dir:
        if cache.empty_dir.medium:
            empty_dir["medium"] = cache.empty_dir.medium
        if cache.empty_dir.size_limit is not None:
            empty_dir["sizeLimit"] = str(cache.empty_dir.size_limit)
    return {"emptyDir": empty_dir}
