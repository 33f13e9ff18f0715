"""A PersistentVolumeClaim to be made, as in core/v1."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import Annotations, EachOnce, Labels, ObjectName, Part, Quantity
from stoker_operator.api.v1alpha1.label_selector import LabelSelector

AccessMode = Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"]
#: The mode that lets pods on several nodes share a volume.
SHARED: Final[AccessMode] = "ReadWriteMany"


class VolumeResources(Part):
    """Size of a volume, as in core/v1."""

    requests: Annotated[dict[Annotated[str, Field(max_length=253)], Quantity], Field(max_length=8)]
    """What there must be at least: storage."""
    limits: Annotated[dict[Annotated[str, Field(max_length=253)], Quantity], Field(max_length=8)] | None = None
    """The most there may be."""

    RULES: ClassVar = (
        Rule(
            field="requests",
            holds=lambda it: "storage" in it.requests,
            cel="'storage' in self.requests",
            message="a claim asks for storage",
            remedy="set requests.storage, to 100Gi for example",
        ),
    )


class DataSource(Part):
    """What a volume is filled with at first, such as a snapshot, as in core/v1."""

    api_group: Annotated[str, Field(max_length=253)] | None = None
    """API group of the object; absent for a PersistentVolumeClaim."""
    kind: Annotated[str, Field(min_length=1, max_length=63)]
    """Kind of the object."""
    name: ObjectName
    """Name of the object."""


class DataSourceRef(DataSource):
    """What a volume is filled with at first, as in core/v1."""

    namespace: ObjectName | None = None
    """Namespace of the object. Absent: the endpoint's."""


class VolumeClaimSpec(Part):
    """What kind of volume is asked for, as in core/v1."""

    access_modes: Annotated[list[AccessMode], Field(min_length=1, max_length=3), *EachOnce]
    """Who may mount it: ReadWriteMany for pods on several nodes; ReadWriteOnce and ReadWriteOncePod for an endpoint
    that never has two pods."""
    resources: VolumeResources
    """Its size."""
    storage_class_name: Annotated[str, Field(max_length=253)] | None = None
    """The storage class. Absent: the cluster's default."""
    volume_name: ObjectName | None = None
    """The PersistentVolume to take. Absent: any that fits, or a new one."""
    volume_mode: Literal["Filesystem"] | None = None
    """Filesystem, since the cache is a folder."""
    selector: LabelSelector | None = None
    """Labels of the PersistentVolumes that may be taken."""
    volume_attributes_class_name: ObjectName | None = None
    """The volume attributes class."""
    data_source: DataSource | None = None
    """A claim or snapshot that it is filled from."""
    data_source_ref: DataSourceRef | None = None
    """An object of any kind that it is filled from."""


class ClaimMetadata(Part):
    """Labels and annotations of the claim."""

    labels: Labels | None = None
    """Labels of the claim."""
    annotations: Annotations | None = None
    """Annotations of the claim."""


class VolumeClaimTemplate(Part):
    """A claim to be made."""

    metadata: ClaimMetadata = ClaimMetadata()
    """Labels and annotations of the claim."""
    spec: VolumeClaimSpec
    """What kind of volume is asked for."""

    @property
    def shared(self) -> bool:
        """Whether pods on several nodes may mount it."""
        return SHARED in self.spec.access_modes
