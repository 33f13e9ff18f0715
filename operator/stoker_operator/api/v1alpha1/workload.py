"""A set of identical pods: their hardware, parallelism, engine and pod template."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1 import parallelism as parallelism_rules
from stoker_operator.api.v1alpha1.base import NOT_IN_PODS, Part
from stoker_operator.api.v1alpha1.engine import Engine
from stoker_operator.api.v1alpha1.hardware import CPU, Hardware
from stoker_operator.api.v1alpha1.parallelism import Parallelism, Sizes, resolve
from stoker_operator.api.v1alpha1.template import PodTemplate


class Workload(Part):
    """A set of identical pods."""

    replicas: Annotated[
        int,
        # The scale subresource reads the stored field, so the CRD has this default.
        Field(ge=0, le=10000, json_schema_extra={"x-default": 1}),
        NOT_IN_PODS,
    ] = 1
    """Number of pods that serve the model; with hardware.nodes, number of groups of that many pods. A
    HorizontalPodAutoscaler can write it through the scale subresource. With spec.scaling it has no effect."""
    hardware: Hardware
    """The hardware of a replica."""
    parallelism: Parallelism | None = None
    """Division of the model among the accelerators of a replica. tensor × pipeline × data must equal count × nodes;
    with hardware.allowIdle it may be less. Without mode, an absent tensor or data follows from the other sizes; if both
    are absent, data is 1. On accelerator cpu the sizes count processes that share the pod's processors and memory, and
    an absent size is 1."""
    engine: Engine = Engine()
    """The inference engine in each pod. An absent field leaves the engine's default, unless the field's description
    states another."""
    template: PodTemplate = PodTemplate()
    """Pod template, merged onto the operator's: node selector, tolerations, affinity, volumes, pull secrets,
    sidecars …"""

    RULES: ClassVar[tuple[Rule, ...]] = parallelism_rules.RULES

    @property
    def sizes(self) -> Sizes:
        """Sizes of `parallelism`, with defaults. With mode Auto they are provisional, until the planner chooses."""
        if self.hardware.accelerator == CPU:
            parallelism = self.parallelism or Parallelism()
            return Sizes(parallelism.tensor or 1, parallelism.pipeline or 1, parallelism.data or 1)
        if self.parallelism is not None and self.parallelism.mode is not None:
            parallelism = self.parallelism
            if (parallelism.tensor, parallelism.data, parallelism.pipeline) == (None, None, None):
                return Sizes(self.hardware.accelerators, self.hardware.pods_per_replica, 1)
        return resolve(self.hardware.gpus, self.parallelism)
