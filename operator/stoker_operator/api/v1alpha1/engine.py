"""The engine that runs in each pod, and its settings."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stoker_engine.contract.names import Dtype, KVCacheDtype
from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import DataKey, ObjectName, Part, Quantity

ImagePullPolicy = Literal["Always", "IfNotPresent", "Never"]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]


class KeyRef(Part):
    """A key of a ConfigMap or Secret in the endpoint's namespace."""

    name: ObjectName
    """Name of the ConfigMap or Secret."""
    key: DataKey
    """Key whose value is taken."""
    optional: bool | None = None
    """Whether a pod starts also where the key does not exist."""


class FieldRef(Part):
    """A field of the pod."""

    field_path: Annotated[str, Field(min_length=1, max_length=256)]
    """Path of the field, such as metadata.name."""
    api_version: Annotated[str, Field(max_length=64)] | None = None
    """Version the path is written in. Absent: v1."""


class ResourceFieldRef(Part):
    """A resource of a container of the pod."""

    resource: Annotated[str, Field(min_length=1, max_length=256)]
    """The resource, such as limits.memory."""
    container_name: Annotated[str, Field(max_length=63)] | None = None
    """Name of the container. Absent: the engine's."""
    divisor: Quantity | None = None
    """Unit the value is given in."""


class EnvVarSource(Part):
    """Where the value of an environment variable comes from. Exactly one of the four."""

    secret_key_ref: KeyRef | None = None
    """A key of a Secret."""
    config_map_key_ref: KeyRef | None = None
    """A key of a ConfigMap."""
    field_ref: FieldRef | None = None
    """A field of the pod."""
    resource_field_ref: ResourceFieldRef | None = None
    """A resource of a container of the pod."""

    RULES: ClassVar = (
        Rule(
            field="",
            holds=lambda it: len(it.model_fields_set) == 1,
            cel="[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef), has(self.resourceFieldRef)]"
            ".filter(given, given).size() == 1",
            message="a value comes from one place",
            remedy="set one of secretKeyRef, configMapKeyRef, fieldRef and resourceFieldRef",
        ),
    )


class EnvVar(Part):
    """An environment variable, as in core/v1."""

    name: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")]
    """Name of the variable."""
    value: Annotated[str, Field(max_length=32768)] | None = None
    """Its value; $(NAME) stands for a variable listed before. Absent: valueFrom, or the empty string."""
    value_from: EnvVarSource | None = None
    """Where the value comes from."""

    RULES: ClassVar = (
        Rule(
            field="",
            holds=lambda it: it.value is None or it.value_from is None,
            cel="!(has(self.value) && has(self.valueFrom))",
            message="a variable has one value",
            remedy="set either value or valueFrom",
        ),
    )


class Engine(Part):
    """The engine that runs in each pod. What is absent is left to the engine's own default."""

    runtime: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")] = "stoker"
    """Which engine runs; the accelerator catalogue lists those there are. Absent: stoker."""
    image: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\s]+$")] | None = None
    """Container image. Absent: the catalogue's for this runtime and accelerator."""
    image_pull_policy: ImagePullPolicy | None = None
    """When nodes pull the image. Absent: Always for the tag latest, else IfNotPresent."""
    dtype: Dtype | None = None
    """Type of weights and activations. auto, or absent: the checkpoint's own, float32 for GGUF."""
    kv_cache_dtype: KVCacheDtype | None = None
    """Type of the key-value cache. auto, or absent: that of the model."""
    max_num_seqs: Positive | None = None
    """The most sequences in one step."""
    max_num_batched_tokens: Positive | None = None
    """The most tokens in one step, over all sequences."""
    max_model_len: Positive | None = None
    """The longest sequence, prompt and output. Absent: the model's own."""
    gpu_memory_utilization_percent: Annotated[int, Field(ge=1, le=100)] | None = None
    """Share of the accelerator's memory the engine may use. Absent: 92."""
    enable_prefix_caching: bool | None = None
    """Whether the cached beginning of an earlier request is reused. Absent: it is."""
    args: Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(max_length=64)] | None = None
    """More words for the engine's command line, for flags that have no field here. A flag that contradicts a field is
    refused."""
    env: (
        Annotated[
            list[EnvVar],
            Field(
                max_length=64,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
            ),
        ]
        | None
    ) = None
    """More environment variables of the engine."""
