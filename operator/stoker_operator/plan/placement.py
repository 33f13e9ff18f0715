"""The accelerators of a pod, and how they share a model.

    tensor × pipeline × data  =  accelerators that a replica uses

Each layer of an engine is split over `tensor` accelerators, the layers are distributed over `pipeline` stages, and
there are `data` engines. On a CPU the accelerators are ranks: processes that share the pod's processors and memory.
Sizes that the user omits are derived from the others and reported in the status, never written into the spec. The API
server checks sizes itself (`api.v1alpha1.parallelism`); this module does the checks that need the catalogue.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_operator.api.v1alpha1.hardware import CPU
from stoker_operator.api.v1alpha1.parallelism import Sizes
from stoker_operator.api.v1alpha1.workload import Workload
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.plan.catalogue import Accelerator, Catalogue


@dataclass(frozen=True)
class Placement:
    """The accelerators of a pod and how they share the model.

    Attributes:
        accelerator: the catalogue's entry.
        count: number of accelerators of a pod.
        nodes: number of pods of a replica.
        tensor: number of accelerators over which each layer is split.
        pipeline: number of stages over which the layers are distributed.
        data: number of engines of a replica.
        expert: whether experts are distributed whole over accelerators, instead of each being split.
        idle: number of unused accelerators of a replica.
    """

    accelerator: Accelerator
    count: int
    nodes: int
    tensor: int
    pipeline: int
    data: int
    expert: bool = False
    idle: int = 0

    @property
    def sizes(self) -> Sizes:
        """tensor, pipeline and data."""
        return Sizes(self.tensor, self.pipeline, self.data)


def placement_of(workload: Workload, catalogue: Catalogue) -> Placement:
    """Return the placement of a workload that obeys the rules of the API.

    Raises:
        Refused: the catalogue lacks the runtime or the accelerator, or the number of accelerators is stated twice.
    """
    catalogue.images_of(workload.engine.runtime)
    hardware = workload.hardware
    accelerator = catalogue.accelerator(hardware.accelerator)
    _resource_is_ours(workload, accelerator)
    sizes = workload.sizes
    parallelism = workload.parallelism
    return Placement(
        accelerator,
        hardware.accelerators,
        hardware.pods_per_replica,
        *sizes,
        expert=parallelism is not None and (parallelism.expert or 1) > 1,
        idle=0 if hardware.accelerator == CPU else max(hardware.gpus - sizes.used, 0),
    )


def _resource_is_ours(workload: Workload, accelerator: Accelerator) -> None:
    """Check that only ``spec.hardware.count`` states the number of accelerators.

    Raises:
        Refused: the container's resources also state it.
    """
    resources = workload.hardware.resources
    for name in ("limits", "requests"):
        amounts = getattr(resources, name, None) or {}
        if accelerator.resource in amounts:
            raise Refused(
                Violation(
                    f"spec.hardware.resources.{name}[{accelerator.resource}]",
                    "spec.hardware.count states the number of accelerators",
                    "set that field, and remove this one",
                )
            )
