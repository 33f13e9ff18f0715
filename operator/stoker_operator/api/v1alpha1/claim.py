"""Template of a PersistentVolumeClaim, as in core/v1."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from stoker_operator.api.rule import ChangeRule, Rule
from stoker_operator.api.v1alpha1.base import (
    METADATA_KEYS,
    NOT_IN_PODS,
    Annotations,
    EachOnce,
    Labels,
    ObjectName,
    Part,
    Quantity,
    without_own_labels,
)
from stoker_operator.api.v1alpha1.label_selector import LabelSelector

AccessMode = Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"]
#: Access mode with which pods on several nodes can write to a volume.
SHARED: Final[AccessMode] = "ReadWriteMany"


def _same(field: str, now: str = "self", before: str = "oldSelf") -> str:
    """Return the CEL expression that `field` is unchanged, or absent in both versions."""
    return f"has({now}.{field}) == has({before}.{field}) && (!has({now}.{field}) || {now}.{field} == {before}.{field})"


class VolumeResources(Part):
    """Size of a volume, as in core/v1."""

    requests: Annotated[dict[Annotated[str, Field(max_length=253)], Quantity], Field(max_length=8)]
    """Minimum amounts; storage is the size."""
    limits: Annotated[dict[Annotated[str, Field(max_length=253)], Quantity], Field(max_length=8)] | None = None
    """Maximum amounts."""

    RULES: ClassVar = (
        Rule(
            field="requests",
            holds=lambda it: "storage" in it.requests,
            cel="'storage' in self.requests",
            message="a claim must request storage",
            remedy="set requests.storage, for example to 100Gi",
        ),
    )


class DataSource(Part):
    """Object with a volume's initial content, such as a snapshot, as in core/v1."""

    api_group: Annotated[str, Field(max_length=253)] | None = None
    """API group of the object; absent for a PersistentVolumeClaim."""
    kind: Annotated[str, Field(min_length=1, max_length=63)]
    """Kind of the object."""
    name: ObjectName
    """Name of the object."""


class DataSourceRef(DataSource):
    """Object of any kind with a volume's initial content, as in core/v1."""

    namespace: ObjectName | None = None
    """Namespace of the object. Absent: the endpoint's."""


class VolumeClaimSpec(Part):
    """The requested volume, as in core/v1."""

    access_modes: Annotated[list[AccessMode], Field(min_length=1, max_length=3), *EachOnce]
    """Access modes. They must include ReadWriteMany if there may be several pods, also during a roll-out."""
    resources: VolumeResources
    """Size of the volume."""
    storage_class_name: Annotated[str, Field(max_length=253)] | None = None
    """Name of the StorageClass. Absent: the cluster's default."""
    volume_name: ObjectName | None = None
    """Name of the PersistentVolume to use. Absent: any that fits, or a new one."""
    volume_mode: Literal["Filesystem"] | None = None
    """Volume mode; only Filesystem, because the cache is a folder."""
    selector: LabelSelector | None = None
    """Selector of the PersistentVolumes that may be used."""
    volume_attributes_class_name: ObjectName | None = None
    """Name of the VolumeAttributesClass."""
    data_source: DataSource | None = None
    """A claim or snapshot with the volume's initial content."""
    data_source_ref: DataSourceRef | None = None
    """An object of any kind with the volume's initial content."""

    CHANGES: ClassVar = (
        ChangeRule(
            field="",
            holds=lambda now, before: now.identity == before.identity,
            cel=" && ".join(
                (
                    "self.accessModes == oldSelf.accessModes",
                    *(
                        _same(name)
                        for name in (
                            "storageClassName",
                            "volumeName",
                            "volumeMode",
                            "selector",
                            "dataSource",
                            "dataSourceRef",
                        )
                    ),
                    _same("limits", "self.resources", "oldSelf.resources"),
                    *(
                        f"{one}.resources.requests.all(name, name == 'storage' || (name in {other}.resources.requests"
                        f" && {other}.resources.requests[name] == {one}.resources.requests[name]))"
                        for one, other in (("self", "oldSelf"), ("oldSelf", "self"))
                    ),
                )
            ),
            message="a claim cannot be changed, except its size and volume attributes class",
            remedy="restore it, or delete the endpoint and create it again",
        ),
    )

    @property
    def identity(self) -> tuple[Any, ...]:
        """The parts of a claim whose change the API server refuses."""
        other_requests = {name: amount for name, amount in self.resources.requests.items() if name != "storage"}
        changeable = {"access_modes", "resources", "volume_attributes_class_name"}
        return set(self.access_modes), other_requests, self.resources.limits, self.model_dump(exclude=changeable)


class ClaimMetadata(Part):
    """Labels and annotations of the claim."""

    labels: Labels | None = None
    """Labels of the claim. The labels by which the operator selects it cannot be set."""
    annotations: Annotations | None = None
    """Annotations of the claim."""

    RULES: ClassVar = (without_own_labels("the claim"), *METADATA_KEYS)


class VolumeClaimTemplate(Part):
    """Template of a claim that the operator creates."""

    metadata: Annotated[ClaimMetadata, NOT_IN_PODS] = ClaimMetadata()
    """Labels and annotations of the claim."""
    spec: Annotated[VolumeClaimSpec, NOT_IN_PODS]
    """The requested volume. Two fields can be changed later: volumeAttributesClassName, and resources.requests.storage,
    which can grow if the storage class allows expansion. After a failed expansion it can be lowered, but only to more
    than the volume's current size."""

    @property
    def shared(self) -> bool:
        """Whether pods on several nodes may mount the claim's volume."""
        return SHARED in self.spec.access_modes
