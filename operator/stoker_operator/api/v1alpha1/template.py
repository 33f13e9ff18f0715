"""The user's pod template, which is merged onto the operator's."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from stoker_operator.api.v1alpha1.base import METADATA_KEYS, Annotations, Labels, Part, without_own_labels

#: Name of the engine's container, onto which a template's container of this name is merged.
ENGINE_CONTAINER: Final = "engine"


class PodTemplateMetadata(Part):
    """Labels and annotations of the pods."""

    labels: Labels | None = None
    """Additional labels of the pods. The labels by which the operator selects them cannot be set."""
    annotations: Annotations | None = None
    """Annotations of the pods."""

    RULES: ClassVar = (without_own_labels("the pods"), *METADATA_KEYS)


class PodTemplate(Part):
    """Pod template, merged onto the operator's: node selector, tolerations, affinity, volumes, pull secrets,
    sidecars …"""

    metadata: PodTemplateMetadata = PodTemplateMetadata()
    """Labels and annotations of the pods."""
    spec: Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})] | None = (
        None
    )
    """Part of a core/v1 PodSpec (`kubectl explain pod.spec`), merged onto the operator's much as by `kubectl patch`:
    lists of named items are merged by name. The container called engine is the operator's; others run beside it.
    Settings that the operator makes are refused here, such as the engine's image, imagePullPolicy, command, args, env
    and resources, and terminationGracePeriodSeconds. The administrator may restrict the rest (policy.template of the
    Helm chart), and the API server validates it strictly when the Deployment is applied."""
