"""Rules for accelerators and CPU ranks that do not depend on the model.

All slices of a TPU node pool have one topology. A TPU pod must select it, or is never scheduled (GKE, "Deploy TPU
workloads"), and a replica has all chips of its slice. The memory of a time-sliced GPU is not divided among the pods
that share it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, Final

from stoker_operator.api.quantity import amount
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.v1alpha1.hardware import CPU
from stoker_operator.api.violation import Violation
from stoker_operator.plan.placement import Placement
from stoker_operator.plan.proposals import Proposal, Refusal

#: The usual topologies of slices of one host, by number of chips.
_SHAPES: Final = {1: "1x1", 4: "2x2", 8: "2x4"}


def unusable(spec: Spec, placement: Placement) -> Iterator[Violation | Refusal]:
    """Yield the reasons why no node accepts the pods: a topology that is missing or has another number of chips."""
    label = placement.accelerator.topology_label
    if label is None:
        return
    chips = placement.count * placement.nodes
    field = f"spec.template.spec.nodeSelector[{label}]"
    found = _selected(spec.template.spec or {}, label)
    if not found:
        yield Violation(
            field,
            f"no slice topology is selected, so no node ever accepts a pod with {spec.hardware.accelerator}",
            f"set it to your node pool's topology, of {chips} chips{_shape(chips)}",
            reason="TopologyMissing",
        )
    elif all(_chips(value) != chips for value in found):
        yield Refusal(
            field,
            f"topology {' or '.join(found)} does not have the {chips} chips of a replica",
            "TopologyMismatch",
            lambda: _matching(spec, label, chips, found),
            f"use a node pool whose slices have {chips} chips, and select its topology",
        )


def _matching(spec: Spec, label: str, chips: int, selected: list[str]) -> Iterator[Proposal]:
    """Propose counts of chips that match the selected topologies, and a topology that matches the spec's count."""
    unsized = {} if spec.parallelism is None else {"parallelism": None}
    for count in dict.fromkeys(filter(None, map(_chips, selected))):
        also = " and remove spec.parallelism" if unsized else ""
        change = {"hardware": {"count": count, "nodes": None}, **unsized}
        yield Proposal(f"set spec.hardware.count to {count}{also}", change)
    if label in _part(spec.template.spec, "nodeSelector") and (shape := _SHAPES.get(chips)):
        yield Proposal(f"select topology {shape}", {"template": {"spec": {"nodeSelector": {label: shape}}}})


def warnings(spec: Spec, placement: Placement) -> Iterator[str]:
    """Yield warnings about the spec's accelerators or CPU ranks."""
    if placement.accelerator.shared and spec.engine.gpu_memory_utilization_percent is None:
        yield (
            "the pods on a time-sliced device share its memory without isolation; set "
            "spec.engine.gpuMemoryUtilizationPercent to this pod's share"
        )

    ranks, processors = placement.sizes.used, _processors(spec)
    if spec.hardware.accelerator == CPU and processors is not None and ranks > processors:
        yield (
            f"{ranks} ranks share {processors:g} processors and wait for one another; set "
            f"spec.hardware.resources.limits.cpu to {ranks} or more, or use smaller sizes in spec.parallelism"
        )


def _processors(spec: Spec) -> float | None:
    """Return the pod's CPU limit in processors; None if it has none."""
    limits = spec.hardware.resources.limits if spec.hardware.resources else None
    limit = (limits or {}).get("cpu")
    return None if limit is None else float(amount(limit))


def _selected(pod: Any, label: str) -> list[str]:
    """Return the values of a node label that a pod selects. Malformed parts of the template are ignored."""
    selector = _part(pod, "nodeSelector")
    if isinstance(selector.get(label), str):
        return [selector[label]]
    required = _part(_part(_part(pod, "affinity"), "nodeAffinity"), "requiredDuringSchedulingIgnoredDuringExecution")
    terms = [each for each in required.get("nodeSelectorTerms") or () if isinstance(each, dict)]
    expressions = [each for term in terms for each in term.get("matchExpressions") or () if isinstance(each, dict)]
    named = [each for each in expressions if each.get("key") == label and each.get("operator") == "In"]
    return [str(value) for each in named for value in each.get("values") or ()]


def _part(of: Any, name: str) -> dict[str, Any]:
    inner = of.get(name) if isinstance(of, dict) else None
    return inner if isinstance(inner, dict) else {}


def _chips(topology: str) -> int:
    """Return the number of chips of a slice with this topology; 0 if it is not a topology."""
    if not re.fullmatch(r"\d{1,4}(x\d{1,4}){1,2}", topology):
        return 0
    return math.prod(map(int, topology.split("x")))


def _shape(chips: int) -> str:
    """Return the usual topology of `chips` on one host, as a suffix of a sentence; empty if there is none."""
    return f": {_SHAPES[chips]}" if chips in _SHAPES else ""
