"""Valid and invalid changes of a spec's storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .spec_cases import (
    Spec,
    claim,
)


@dataclass(frozen=True)
class Change:
    """A change of the storage.

    Attributes:
        name: what is changed.
        before, after: ``spec.storage`` before and after.
        field: field of the expected error; empty for a valid change.
        sentence: message of both validators.
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
_RESTORE = "restore it, or delete the endpoint and create it again"
_MOVED = ("spec.storage.cache", f"the cache cannot be moved to another volume; {_RESTORE}")
_CLAIM = "spec.storage.cache.volumeClaimTemplate.spec"
_OTHERWISE = (
    _CLAIM,
    f"a claim cannot be changed, except its size and volume attributes class; {_RESTORE}",
)
#: Valid and invalid changes of the cache.
CHANGES = (
    Change("to a claim", None, _EXISTING, *_MOVED),
    Change("from a claim", _EXISTING, None, *_MOVED),
    Change("from a claim to no volume", _EXISTING, {"cache": None}, *_MOVED),
    Change("from the node to a claim", _NODE, _EXISTING, *_MOVED),
    Change("to another claim", _EXISTING, {"cache": {"persistentVolumeClaim": {"claimName": "others"}}}, *_MOVED),
    Change("to a claim from a template", _EXISTING, _sized("1Gi"), *_MOVED),
    Change("from a claim from a template to the node", _sized("1Gi"), _NODE, *_MOVED),
    Change("from the default to the node, explicitly", {"shmSize": "1Gi"}, _NODE),
    Change("from the node to the default", {"cache": {"emptyDir": {"sizeLimit": "1Gi"}}}, None),
    Change("a size limit on the node", _NODE, {"cache": {"emptyDir": {"sizeLimit": "1Gi"}}}),
    Change("a smaller size limit, in memory", {"cache": {"emptyDir": {"sizeLimit": "2Gi"}}},
           {"cache": {"emptyDir": {"sizeLimit": "1Gi", "medium": "Memory"}}}),
    Change("growth", _sized("1Gi"), _sized("2Gi")),
    Change("growth across units", _sized("900Mi"), _sized("1e9")),
    Change("growth of a size without unit", _sized(5), _sized("6")),
    Change("an equal size in another unit", _sized("1Gi"), _sized("1024Mi")),
    Change("a smaller size, as before a growth", _sized("2Gi"), _sized("1Gi")),
    Change("other modes", _sized("1Gi"), claim("ReadWriteMany"), *_OTHERWISE),
    Change("a storage class", _sized("1Gi"), _sized("1Gi", storageClassName="fast"), *_OTHERWISE),
    Change("another storage class", _sized("1Gi", storageClassName="a"),
           _sized("9Gi", storageClassName="b"), *_OTHERWISE),
    Change("another volume", _sized("1Gi", volumeName="a"), _sized("1Gi", volumeName="b"), *_OTHERWISE),
    Change("a selector removed", _sized("1Gi", selector={"matchLabels": {"a": "b"}}), _sized("1Gi"), *_OTHERWISE),
    Change("a limit added", _sized("1Gi"),
           _sized("", resources={"requests": {"storage": "1Gi"}, "limits": {"storage": "9Gi"}}), *_OTHERWISE),
    Change("a request added", _sized("1Gi"),
           _sized("", resources={"requests": {"storage": "1Gi", "iops": "5"}}), *_OTHERWISE),
    Change("a request removed", _sized("", resources={"requests": {"storage": "1Gi", "iops": "5"}}),
           _sized("1Gi"), *_OTHERWISE),
    Change("modes in another order", _sized("1Gi"),
           claim("ReadWriteOnce", "ReadWriteMany", resources={"requests": {"storage": "1Gi"}})),
    Change("another attributes class", _sized("1Gi", volumeAttributesClassName="a"),
           _sized("1Gi", volumeAttributesClassName="b")),
    Change("labels added to the claim", _sized("1Gi"),
           {"cache": {"volumeClaimTemplate": {**_sized("1Gi")["cache"]["volumeClaimTemplate"],
                                              "metadata": {"labels": {"a": "b"}}}}}),
)  # fmt: skip
