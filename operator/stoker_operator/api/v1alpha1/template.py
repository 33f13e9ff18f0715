"""What the user adds to the pods: a pod template that is merged onto ours."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from stoker_operator.api.v1alpha1.base import METADATA_KEYS, Annotations, Labels, Part, without_own_labels

#: The container of a pod template that is merged onto the engine's.
ENGINE_CONTAINER: Final = "engine"


class PodTemplateMetadata(Part):
    """Labels and annotations of the pods."""

    labels: Labels | None = None
    """More labels of the pods. Those by which the operator finds them cannot be set."""
    annotations: Annotations | None = None
    """Annotations of the pods."""

    RULES: ClassVar = (without_own_labels("the pods"), *METADATA_KEYS)


class PodTemplate(Part):
    """What is added to the pods: node selectors, tolerations, affinity, volumes, pull secrets, sidecars …"""

    metadata: PodTemplateMetadata = PodTemplateMetadata()
    """Labels and annotations of the pods."""
    spec: Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})] | None = (
        None
    )
    """Part of a core/v1 PodSpec (`kubectl explain pod.spec`), merged onto the operator's as `kubectl patch` does: lists
    of named things by name. The container called engine is the operator's; others run beside it. What has a field of
    its own is refused here: the engine's image, imagePullPolicy, command, args, env and resources, and
    terminationGracePeriodSeconds. Of the rest the administrator may permit less than all (policy.template of the Helm
    chart), and the API server checks it strictly when the pods are applied."""
