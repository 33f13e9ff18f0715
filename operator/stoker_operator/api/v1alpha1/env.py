"""Environment variables, as in core/v1."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import DataKey, ObjectName, Part, Quantity


class KeyRef(Part):
    """A key of a ConfigMap or Secret in the endpoint's namespace."""

    name: ObjectName
    """Name of the ConfigMap or Secret."""
    key: DataKey
    """Key in the ConfigMap or Secret."""
    optional: bool | None = None
    """Whether a pod starts even if the object or the key does not exist."""


class FieldRef(Part):
    """A field of the pod."""

    field_path: Annotated[str, Field(min_length=1, max_length=256)]
    """Path of the field, such as metadata.name."""
    api_version: Annotated[str, Field(max_length=64)] | None = None
    """API version of the path. Absent: v1."""


class ResourceFieldRef(Part):
    """A resource of a container of the pod."""

    resource: Annotated[str, Field(min_length=1, max_length=256)]
    """The resource, such as limits.memory."""
    container_name: Annotated[str, Field(max_length=63)] | None = None
    """Name of the container. Absent: the engine's."""
    divisor: Quantity | None = None
    """Unit of the value. Absent: 1."""


class FileKeyRef(Part):
    """A variable in a file that an init container wrote."""

    volume_name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Name of an emptyDir volume of the pod."""
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Relative path of the file in that volume."""
    key: Annotated[str, Field(min_length=1, max_length=256)]
    """Name of the variable in the file."""
    optional: bool | None = None
    """Whether a pod starts even if the file or the variable does not exist."""


class EnvVarSource(Part):
    """Source of the value of an environment variable."""

    secret_key_ref: KeyRef | None = None
    """A key of a Secret in the endpoint's namespace."""
    config_map_key_ref: KeyRef | None = None
    """A key of a ConfigMap in the endpoint's namespace."""
    field_ref: FieldRef | None = None
    """A field of the pod."""
    resource_field_ref: ResourceFieldRef | None = None
    """A resource of a container of the pod."""
    file_key_ref: FileKeyRef | None = None
    """A variable in a file that an init container wrote. It needs Kubernetes 1.35 or newer."""

    RULES: ClassVar = (
        Rule(
            field="",
            holds=lambda it: len(it.model_fields_set) == 1,
            cel="[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef), has(self.resourceFieldRef), "
            "has(self.fileKeyRef)].filter(given, given).size() == 1",
            message="a value has exactly one source",
            remedy="set one of secretKeyRef, configMapKeyRef, fieldRef, resourceFieldRef and fileKeyRef",
        ),
    )

    @property
    def is_optional(self) -> bool:
        """Whether a pod starts without the variable if its source does not exist."""
        source = self.secret_key_ref or self.config_map_key_ref or self.file_key_ref
        return source is not None and bool(source.optional)


class EnvVar(Part):
    """An environment variable, as in core/v1."""

    name: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")]
    """Name of the variable."""
    value: Annotated[str, Field(max_length=32768)] | None = None
    """The value; $(NAME) is replaced with the value of an earlier variable. Absent: that of valueFrom, or the empty
    string."""
    value_from: EnvVarSource | None = None
    """Source of the value; exactly one field must be set."""

    RULES: ClassVar = (
        Rule(
            field="",
            holds=lambda it: it.value is None or it.value_from is None,
            cel="!(has(self.value) && has(self.valueFrom))",
            message="a variable has one value",
            remedy="set either value or valueFrom",
        ),
    )
