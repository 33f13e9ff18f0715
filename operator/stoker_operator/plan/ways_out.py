"""Planned remedies for sizes that violate a rule of the API, and for replicas of several pods.

The rules of the API do not know the model. They require a value of tensor × pipeline × data, but sizes with that
product may not suit the model's heads, layers or memory. If the model's shape is known, planned remedies replace those
of the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pydantic import ValidationError

from stoker_operator.api.v1alpha1 import InferenceEndpoint, Spec
from stoker_operator.api.v1alpha1.hardware import MAX_COUNT
from stoker_operator.api.v1alpha1.parallelism import explain
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.plan.options import NODE_COUNTS
from stoker_operator.plan.proposals import Proposal, Refusal, changed
from stoker_operator.plan.remedies import option_text, possible_ways, shared_by
from stoker_operator.plan.study import Study

#: Plans a spec without remedies, and evaluates all layouts if the flag is set; None if that raises `Refused`.
Trial = Callable[[Spec, bool], Study | None]

#: Remedy if no pod with these accelerators is known to hold the model.
_NO_POD: Final = "set nodes to 1, and use a smaller model, or accelerators with more memory"
_FIELD: Final = "spec.parallelism"
#: Prefixes of the fields whose violations depend on sizes and counts.
_OF_SIZES: Final = (_FIELD, "spec.hardware")


def read_with_wrong_sizes(manifest: Any, against: Sequence[Violation]) -> Spec | None:
    """Return the spec of a manifest if one of its violations is a wrong product of sizes; otherwise None."""
    if not isinstance(manifest, Mapping) or all(each.field != _FIELD for each in against):
        return None
    try:
        spec = InferenceEndpoint.model_validate(dict(manifest)).spec
    except ValidationError:
        return None
    return spec if _broken(spec) in against else None


def of_sizes(
    spec: Spec, against: Sequence[Violation], trial: Trial, study: Callable[[Spec], Study]
) -> tuple[Violation, ...]:
    """Return the violations of a spec whose sizes do not match its accelerators, with planned remedies if possible.

    Args:
        against: all violations of `spec`.
        trial: plans a spec without remedies.
        study: plans a spec with remedies.
    """
    broken = instead = _broken(spec)
    for even in _even(spec):
        found = trial(even, True)
        if found is None or found.unknown:
            return tuple(against)
        planned = _with_remedies(spec, broken, found, trial)
        if planned.remedy:
            return tuple(planned if each == broken else each for each in against)
        if spec.hardware.pods_per_replica > 1:
            return tuple(replace(each, remedy=_NO_POD) if each == broken else each for each in against)
        try:
            objections = study(even)
        except Refused:
            return tuple(against)
        due = [each for each in objections.unplannable if (each.field, each.reason) not in _kept(found)]
        if due:
            stated = f"no sizes that use all {spec.hardware.gpus} are possible; with {option_text(found.chosen)}"
            instead = replace(broken, remedy=f"{stated}: {due[0].sentence}")
    return tuple(instead if each == broken else each for each in against)


def of_nodes(spec: Spec, trial: Trial) -> Iterator[Violation]:
    """Yield the violation of a replica of several pods, which the operator cannot connect yet."""
    if spec.hardware.pods_per_replica == 1:
        return
    proposal = next(_one_pod(spec, trial), None)
    yield Violation(
        "spec.hardware.nodes",
        f"a replica of {spec.hardware.pods_per_replica} pods cannot be run yet with runtime {spec.engine.runtime}: "
        "`stoker plan` can plan it, but the operator cannot connect its pods",
        proposal.text if proposal else _NO_POD,
        reason="NotSupported",
    )


def _broken(spec: Spec) -> Violation:
    return Violation(_FIELD, *explain(spec))


def _even(spec: Spec) -> Iterator[Spec]:
    """Yield the spec with sizes that use all accelerators: first with its own `pipeline` if that divides them, then
    without stating it."""
    hardware = spec.hardware
    stated = spec.parallelism.pipeline if spec.parallelism else None
    for pipeline in dict.fromkeys((stated, None)):
        each, uneven = divmod(hardware.gpus, pipeline or 1)
        if uneven:
            continue
        tensor = max(size for size in range(1, hardware.accelerators + 1) if each % size == 0)
        sizes = {"tensor": tensor, "pipeline": pipeline, "data": each // tensor, "expert": None}
        even = changed(spec, {"parallelism": sizes})
        if even is not None:
            yield even


def _with_remedies(spec: Spec, broken: Violation, found: Study, trial: Trial) -> Violation:
    """Return the violation with the remedies that are possible."""
    kept = _kept(found)
    refusal = Refusal(_FIELD, broken.message, broken.reason, lambda: _proposals(spec, found, trial), "")
    return refusal.violation(lambda _, proposal: _accepts(spec, proposal, trial, kept))


def _proposals(spec: Spec, found: Study, trial: Trial) -> Iterator[Proposal]:
    """Propose a single pod instead of several, or else the possible layouts of `found` and hardware for the sizes."""
    hardware, used = spec.hardware, spec.sizes.used
    if hardware.pods_per_replica > 1:
        yield from _one_pod(spec, trial)
        return
    if found.advice is not None:
        yield from possible_ways(found.options, found.advice)
    if used < hardware.gpus:
        yield Proposal("set hardware.allowIdle to true", {"hardware": {"allowIdle": True}})
    elif used <= MAX_COUNT:
        yield Proposal(f"set hardware.count to {used}", {"hardware": {"count": used}})


def _one_pod(spec: Spec, trial: Trial) -> Iterator[Proposal]:
    """Propose a single pod with the same kind of accelerator, instead of a replica of several."""
    current_count = spec.hardware.accelerators
    counts = (current_count, *(count for count in NODE_COUNTS if count > current_count))
    fewer_bits = {"engine": {"quantization": "fp8"}}
    for count, engine in (*((count, {}) for count in counts), (current_count, fewer_bits)):
        removed = dict.fromkeys(("tensor", "pipeline", "data", "expert"))
        change: dict[str, Any] = {"hardware": {"nodes": None, "count": count}, "parallelism": removed, **engine}
        alone = changed(spec, change)
        found = trial(alone, True) if alone is not None else None
        if found is None or (found.advice is None and not found.unknown):
            continue
        one_node = "set hardware.nodes to 1" + (f", hardware.count to {count}" if count != current_count else "")
        if found.advice is None:
            text, change = f"{one_node} and remove spec.parallelism", {**change, "parallelism": None}
        else:
            option = found.advice.option
            text = f"{one_node} and use {option_text(option)}"
            change = {**shared_by(option.sizes, option.expert, count), **engine}
        proposal = Proposal(text + (", and set spec.engine.quantization to fp8" if engine else ""), change)
        if _accepts(spec, proposal, trial, _kept(found)):
            yield proposal
            return


def _accepts(spec: Spec, proposal: Proposal, trial: Trial, kept: frozenset[tuple[str, str]]) -> bool:
    """Return whether a proposal leads to a replica of one pod, without violations except for those in `kept`.

    If it changes the hardware, violations of the template are not excepted: its node selector must match the number of
    chips.
    """
    change = proposal.change or {}
    if "hardware" in change:
        kept = frozenset((field, reason) for field, reason in kept if not field.startswith("spec.template"))
    changed_spec = changed(spec, change)
    if changed_spec is None or changed_spec.hardware.pods_per_replica > 1:
        return False
    found = trial(changed_spec, False)
    return found is not None and all((each.field, each.reason) in kept for each in (*found.refused, *found.unplannable))


def _kept(found: Study) -> frozenset[tuple[str, str]]:
    """Return fields and reasons of the violations that do not depend on sizes."""
    problem = found.chosen.problem.reason if found.chosen.problem else ""
    every = (*found.refused, *found.unplannable)
    return frozenset(
        (each.field, each.reason) for each in every if not each.field.startswith(_OF_SIZES) and each.reason != problem
    )
