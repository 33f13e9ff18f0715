"""The volumes of a pod. Its root file system is read-only, so all that is written goes to one of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stoker_engine.contract.sources import PVC_MOUNT, ModelSource
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.manifests.owner import Manifest
from stoker_operator.plan.placement import Placement

CACHE_MOUNT: Final = "/cache"
TEMPLATE_MOUNT: Final = "/etc/stoker/chat-template"
TEMPLATE_FILE: Final = "template.jinja"

#: Where programs look for a place to write to.
CACHE_ENV: Final = {
    "HOME": CACHE_MOUNT,
    "XDG_CACHE_HOME": CACHE_MOUNT,
    "HF_HOME": f"{CACHE_MOUNT}/huggingface",
}


@dataclass(frozen=True)
class Volume:
    """A volume and where the engine finds it."""

    name: str
    mount: str
    source: Manifest
    read_only: bool = False

    def volume(self) -> Manifest:
        """For the pod's ``volumes``."""
        return {"name": self.name, **self.source}

    def volume_mount(self) -> Manifest:
        """For the container's ``volumeMounts``."""
        mount: Manifest = {"name": self.name, "mountPath": self.mount}
        return mount | {"readOnly": True} if self.read_only else mount


def volumes(spec: Spec, placement: Placement) -> list[Volume]:
    """The volumes that the pods of `spec` need."""
    needed = [Volume("cache", CACHE_MOUNT, _cache(spec)), Volume("tmp", "/tmp", {"emptyDir": {}})]
    if placement.tensor > 1:
        # The processes of a split model meet in shared memory, and a container's own is only 64 MiB.
        needed.append(Volume("shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}}))
    source = ModelSource.parse(spec.model.source)
    if source.scheme == "pvc":
        claim = {"persistentVolumeClaim": {"claimName": source.name, "readOnly": True}}
        needed.append(Volume("model", PVC_MOUNT, claim, read_only=True))
    template = spec.model.chat_template
    if template and template.config_map_key_ref:
        ref = template.config_map_key_ref
        config_map = {"configMap": {"name": ref.name, "items": [{"key": ref.key, "path": TEMPLATE_FILE}]}}
        needed.append(Volume("chat-template", TEMPLATE_MOUNT, config_map, read_only=True))
    return needed


def _cache(spec: Spec) -> Manifest:
    cache = spec.storage.cache
    if cache and cache.persistent_volume_claim:
        return {"persistentVolumeClaim": {"claimName": cache.persistent_volume_claim.claim_name}}
    limit = cache.empty_dir.size_limit if cache and cache.empty_dir else None
    return {"emptyDir": {} if limit is None else {"sizeLimit": str(limit)}}
