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
_MOVED = ("spec.storage.cache", "the cache cannot be changed; restore it, or delete the endpoint and create it again")
_CLAIM = "spec.storage.cache.volumeClaimTemplate.spec"
_OTHERWISE = (
    _CLAIM,
    "a claim can be resized, but not changed otherwise; restore it, or delete the endpoint and create it again",
)
#: Valid and invalid changes of the cache.
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
