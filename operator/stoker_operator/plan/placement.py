"""How the accelerators of a pod share a model.

    tensor × data = accelerators of a pod

A copy of the model is split over `tensor` accelerators, and a pod holds `data` copies. What the user leaves out
is chosen here, and goes to the status, never into the spec. The rule itself needs no outside fact, so the API
server judges it (`api.v1alpha1.parallelism`); here is what needs the catalogue, and later the model's shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.v1alpha1.parallelism import resolve
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.plan.catalogue import Accelerator, Catalogue


@dataclass(frozen=True)
class Placement:
    """What one pod runs on, and how.

    Attributes:
        accelerator: the catalogue's entry.
        count: accelerators of a pod.
        tensor: accelerators each copy of the model is split over.
        data: copies of the model in a pod.
    """

    accelerator: Accelerator
    count: int
    tensor: int
    data: int


def place(spec: Spec, catalogue: Catalogue) -> Placement:
    """Decides the placement of a spec that obeys the rules of the API.

    Raises:
        Refused: the catalogue does not allow it.
    """
    _known_runtime(spec, catalogue)
    accelerator = catalogue.accelerator(spec.hardware.accelerator)
    _resource_is_ours(spec, accelerator)
    count = spec.hardware.accelerators
    given = spec.parallelism
    sizes = resolve(count, given.tensor, given.data) if given else (count, 1)
    assert sizes is not None, "the rules of the API let nothing else through"
    return Placement(accelerator, count, *sizes)


def _known_runtime(spec: Spec, catalogue: Catalogue) -> None:
    runtime = spec.engine.runtime
    if runtime not in catalogue.runtimes:
        raise Refused(
            Violation(
                "spec.engine.runtime",
                f"there is no runtime {runtime}",
                f"use {' or '.join(sorted(catalogue.runtimes))}",
                reason="UnknownRuntime",
            )
        )


def _resource_is_ours(spec: Spec, accelerator: Accelerator) -> None:
    """Two fields must not say how many accelerators a pod has."""
    resources = spec.hardware.resources
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
