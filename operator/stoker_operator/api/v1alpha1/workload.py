"""A set of like pods: on what they run, how they share the work, which engine runs, and what is added to them."""

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
    """A set of like pods."""

    replicas: Annotated[
        int,
        # The scale subresource needs a number to be there, so this default is written into the object.
        Field(ge=0, le=10000, json_schema_extra={"x-default": 1}),
        NOT_IN_PODS,
    ] = 1
    """Pods that serve the model; with hardware.nodes, groups of so many pods. Autoscalers write it through the scale
    subresource. With spec.scaling it has no effect."""
    hardware: Hardware
    """What a replica runs on."""
    parallelism: Parallelism | None = None
    """How the accelerators of a replica share the work. tensor × pipeline × data must equal count × nodes. tensor and
    data both absent: tensor takes all there are and data is 1; one of them given: the other is what is left. On
    accelerator cpu, these are processes that share the pod's processors and memory, and absent is 1."""
    engine: Engine = Engine()
    """The engine that runs in each pod. What is absent is left to the engine's own default."""
    template: PodTemplate = PodTemplate()
    """What is added to the pods: node selectors, tolerations, affinity, volumes, pull secrets, sidecars …"""

    RULES: ClassVar[tuple[Rule, ...]] = parallelism_rules.RULES

    @property
    def sizes(self) -> Sizes:
        """`parallelism` with what its absence means; with mode Auto, what holds until more is known."""
        if self.hardware.accelerator == CPU:
            parallelism = self.parallelism or Parallelism()
            return Sizes(parallelism.tensor or 1, parallelism.pipeline or 1, parallelism.data or 1)
        if self.parallelism is not None and self.parallelism.mode is not None:
            parallelism = self.parallelism
            if (parallelism.tensor, parallelism.data, parallelism.pipeline) == (None, None, None):
                return Sizes(self.hardware.accelerators, self.hardware.pods_per_replica, 1)
        return resolve(self.hardware.gpus, self.parallelism)
