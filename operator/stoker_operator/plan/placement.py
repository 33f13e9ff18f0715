"""What a pod runs on, and how its accelerators share a model.

    tensor × pipeline × data  =  accelerators of a replica

Each layer of an engine is split over `tensor` accelerators, the layers are dealt among `pipeline` stages, and there are
`data` engines. On accelerator `cpu` these are ranks, processes that share the pod's processors and memory. What the
user leaves out follows from the rest, and goes to the status, never into the spec. That rule needs no outside fact, so
the API server judges it (`api.v1alpha1.parallelism`); here is what needs the catalogue.
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
    """What one pod runs on, and how.

    Attributes:
        accelerator: the catalogue's entry.
        count: accelerators of a pod.
        nodes: pods of a replica.
        tensor: accelerators each layer is split over.
        pipeline: stages that the layers are dealt among.
        data: engines of the model in a replica.
        expert: whether whole experts are spread over accelerators, instead of each being split.
        idle: accelerators of a replica that are left unused.
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
    """The placement of a workload that obeys the rules of the API.

    Raises:
        Refused: the catalogue has no such runtime or accelerator, or their number is stated twice.
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
    """Two fields must not say how many accelerators a pod has."""
    resources = workload.hardware.resources
    for name in ("limits", "requests"):
        amounts = getattr(resources, name, None) or {}
        if accelerator.resource in amounts:
            raise Refused(
                Violation(
                    f"spec.hardware.resources.{name}[{accelerator.resource}]",
                    "the accelerators of a pod are said by spec.hardware.count",
                    "set that, and remove this",
                )
            )
