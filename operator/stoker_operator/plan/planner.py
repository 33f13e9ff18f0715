"""Plans the pods of a spec that obeys the rules of the API, or explains why they cannot run.

If the model's shape is known, the planner checks heads, layers, experts, memory and lengths. Otherwise the engine
checks them when it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from stoker_common.errors import ModelError
from stoker_common.model_source import ModelSource
from stoker_engine.architectures.own_modules import own_modules
from stoker_engine.architectures.quantization.stated import quantization_method
from stoker_engine.sizing.sharding import not_split
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.v1alpha1.hardware import CPU
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.plan import devices, remedies, ways_out
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.engine_settings import EngineSettings, engine_settings
from stoker_operator.plan.estimate import Estimate
from stoker_operator.plan.layout import bench_of, layout_of, memory_bytes_of
from stoker_operator.plan.model_shapes import Shape, Shapes, shape_of, table
from stoker_operator.plan.options import Option, advise, evaluate_option, options
from stoker_operator.plan.placement import Placement, placement_of
from stoker_operator.plan.proposals import Proposal, Refusal, changed
from stoker_operator.plan.start_refusals import refused_at_start
from stoker_operator.plan.study import Plan as Plan
from stoker_operator.plan.study import Study as Study
from stoker_operator.plan.support import (
    mismatched,
    not_loaded,
    not_read,
    other_runtime,
    scales_not_taken,
    unsupported,
    warnings,
)
from stoker_operator.plan.unplannable import Unplannable as Unplannable


def plan(spec: Spec, catalogue: Catalogue, config: Mapping[str, Any] | None = None) -> Plan:
    """Plan the pods of `spec`.

    Args:
        config: the model's config.json; well-known models need none.

    Raises:
        Unplannable: the model cannot run in this way.
        Refused: the catalogue lacks the runtime, the accelerator or an image, or the number of accelerators is stated
            twice.
    """
    shapes = Shapes()
    found = _study(spec, catalogue, config, shapes, every_way=False)
    if found.refused:
        raise Refused(*found.refused)
    trial = _trial(catalogue, config, shapes)
    unplannable = found.unplannable + tuple(ways_out.of_nodes(spec, trial))
    if unplannable:
        raise Unplannable(*unplannable)
    return Plan(
        found.placement,
        found.image,
        found.chosen.estimate,
        found.unknown,
        found.max_model_len,
        found.warnings,
        found.chosen_by,
    )


def study(spec: Spec, catalogue: Catalogue, config: Mapping[str, Any] | None = None) -> Study:
    """Evaluate the layouts of the model on the accelerators of `spec`. The result includes the violations.

    Raises:
        Unplannable: the runtime cannot run such a model.
        Refused: the catalogue lacks the runtime or the accelerator, or the number of accelerators is stated twice.
    """
    return _study(spec, catalogue, config, Shapes(), every_way=True)


def planned_ways_out(
    manifest: Any,
    against: Sequence[Violation],
    catalogue: Catalogue,
    config_of: Callable[[Spec], Mapping[str, Any] | None],
) -> tuple[Violation, ...]:
    """Return the violations of the API's rules by a manifest, with planned remedies for sizes where possible.

    The rules propose sizes without regard to the model.

    Args:
        manifest: the InferenceEndpoint; may be invalid.
        against: its violations.
        catalogue: accelerators and runtimes.
        config_of: returns the config.json of a spec's model, None if not known; may raise `Refused`.
    """
    spec = ways_out.read_with_wrong_sizes(manifest, against)
    if spec is None:
        return tuple(against)
    try:
        config = config_of(spec)
    except Refused:
        return tuple(against)
    shapes = Shapes()

    def judged(even: Spec) -> Study:
        return _study(even, catalogue, config, shapes, every_way=False)

    return ways_out.of_sizes(spec, against, _trial(catalogue, config, shapes), judged)


def _trial(catalogue: Catalogue, config: Mapping[str, Any] | None, shapes: Shapes) -> ways_out.Trial:
    def trial(spec: Spec, every_way: bool) -> Study | None:
        try:
            return _study(spec, catalogue, config, shapes, every_way=every_way, is_trial=True)
        except Refused:
            return None

    return trial


def _study(
    spec: Spec,
    catalogue: Catalogue,
    config: Mapping[str, Any] | None,
    shapes: Shapes,
    *,
    every_way: bool,
    is_trial: bool = False,
) -> Study:
    """See `study`.

    Args:
        every_way: whether to evaluate other layouts even if the stated one is possible and reaches the target.
        is_trial: whether this is the trial of a proposal, which computes no remedies, and other layouts only with
            `every_way` or mode ``Auto``.
    """
    placement = placement_of(spec, catalogue)
    refused: tuple[Violation, ...] = ()
    image = spec.engine.image or ""
    if not image:
        try:
            image = catalogue.image(spec.engine.runtime, spec.hardware.accelerator)
        except Refused as no_image:
            refused = no_image.violations
    shape = shapes.of(ModelSource.parse(spec.model.source), config, spec.engine.runtime)
    memory = memory_bytes_of(spec, placement)
    settings = engine_settings(spec, memory, spec.hardware.accelerator)
    unknown, bench = shape, None
    if isinstance(shape, Shape):
        unknown, bench = bench_of(spec, shape, settings, memory, placement)
    method = shape.method if isinstance(shape, Shape) else _read(quantization_method, config or {})
    layout = layout_of(spec, placement, shape, bench)
    chosen = evaluate_option(layout, placement.sizes)
    automatic = spec.parallelism is not None and spec.parallelism.mode == "Auto"
    ways: tuple[Option, ...] = ()
    if automatic or every_way or (not is_trial and (chosen.problem or not chosen.serves)):
        ways = options(layout, spec.parallelism.pipeline if spec.parallelism else None)
    advice = advise(layout, ways, spec.replicas)
    if automatic and advice is not None:
        chosen = advice.option
        placement = replace(placement, **chosen.sizes._asdict(), expert=chosen.whole_experts, idle=0)
    if all(way.way != chosen.way for way in ways):
        ways = (chosen, *ways)
    stated = config or {}
    against: list[Refusal | Violation] = [
        *devices.unusable(spec, placement),
        *unsupported(spec, catalogue),
        *_quantization(spec, catalogue, shape, method, config),
        *scales_not_taken(spec, stated),
        *refused_at_start(
            spec, shape, config or {}, lambda: _other_runtimes(spec, catalogue, config or {}, known=True)
        ),
        *_experts(spec, shape),
        *_not_split(spec, catalogue, placement, shape, stated),
        *_length(shape, settings, chosen.estimate),
    ]
    if chosen.problem is not None:
        against.append(remedies.refusal(spec, catalogue, layout, chosen, ways, advice))
    reasons = {each.reason for each in (*refused, *against)}
    is_possible = None if is_trial else _Trials(spec, catalogue, config, shapes, reasons).accept
    notices = [
        *remedies.shortfalls(spec, layout, chosen, advice),
        *([remedies.apart(advice)] if automatic and advice is not None and advice.apart else []),
        *devices.warnings(spec, placement),
        *warnings(spec, method, catalogue, lambda: [] if is_trial else _accepted_by(spec, catalogue, config, shapes)),
    ]
    return Study(
        placement,
        image,
        chosen,
        ways,
        unknown if isinstance(unknown, str) else "",
        _reported_length(chosen.estimate, settings),
        refused,
        tuple(each if isinstance(each, Violation) else each.violation(is_possible) for each in against),
        tuple(notices),
        "spec.parallelism.mode" if automatic else "",
        advice,
        bench.wanted_len if bench else 0,
    )


@dataclass(frozen=True)
class _Trials:
    """Plans specs that proposals have changed.

    Attributes:
        spec, catalogue, config, shapes: inputs of the plan before a proposal.
        reasons: that plan's `Refusal.reason`s. A proposal that resolves one of them need not resolve the others.
    """

    spec: Spec
    catalogue: Catalogue
    config: Mapping[str, Any] | None
    shapes: Shapes
    reasons: Set[str]

    def accept(self, refusal: Refusal, proposal: Proposal) -> bool:
        """Return whether a proposal resolves a refusal without causing another one."""
        spec = changed(self.spec, proposal.change or {})
        if spec is None:
            return False
        config = self.config if proposal.config is None else proposal.config
        try:
            found = _study(spec, self.catalogue, config, self.shapes, every_way=False, is_trial=True)
        except Refused:
            return False
        known_reasons = self.reasons - {refusal.reason}
        return all(
            each.reason in known_reasons and each.field != refusal.field
            for each in (*found.refused, *found.unplannable)
        )


def _accepted_by(spec: Spec, catalogue: Catalogue, config: Mapping[str, Any] | None, shapes: Shapes) -> list[str]:
    """Return the names of the other runtimes that would accept the same spec."""
    trials = _Trials(spec, catalogue, config, shapes, frozenset())
    anything = Refusal("", "", "", tuple, "")
    runtimes = sorted(set(catalogue.runtimes) - {spec.engine.runtime})
    return [name for name in runtimes if trials.accept(anything, other_runtime(name))]


def _quantization(
    spec: Spec, catalogue: Catalogue, shape: Shape | str, method: str, config: Mapping[str, Any] | None
) -> Iterator[Refusal]:
    """Yield the refusals of the model's stated or requested quantization; only those of the first failing check."""
    if config is None:  # the table has the configs of well-known models
        config = table().get(ModelSource.parse(spec.model.source).name)
    if isinstance(shape, Shape):
        if mismatches := tuple(mismatched(spec, shape)):
            yield from mismatches
            return
    elif spec.engine.runtime == "stoker" and _read(own_modules, config or {}):
        yield from not_read(spec, config or {}, lambda: _other_runtimes(spec, catalogue, config or {}))
        return
    if unloaded := tuple(not_loaded(spec, method, catalogue, config)):
        yield from unloaded
    elif spec.engine.runtime == "stoker":
        yield from not_read(spec, config or {}, lambda: _other_runtimes(spec, catalogue, config or {}))


def _read(function: Callable[[Mapping[str, Any]], str], config: Mapping[str, Any]) -> str:
    """Return the result of `function` for a config, or an empty string if the config is not valid."""
    try:
        return function(config)
    except ModelError:
        return ""  # reported when the model's shape is read


def _experts(spec: Spec, shape: Shape | str) -> Iterator[Refusal]:
    expert = spec.parallelism.expert if spec.parallelism else None
    if expert is None:
        return
    if isinstance(shape, Shape) and not shape.experts:
        yield Refusal(
            "spec.parallelism.expert",
            "the model is not a mixture of experts",
            "NotMixtureOfExperts",
            lambda: [Proposal("remove it", {"parallelism": {"expert": None}})],
            "remove it",
        )
        return
    tensor, _, data = spec.sizes
    if expert > 1 and data > 1 and spec.engine.runtime == "stoker":
        return  # `plan.options` refuses it, with another remedy
    if expert != tensor * data:
        yield Refusal(
            "spec.parallelism.expert",
            f"expert {expert} is not tensor ({tensor}) × data ({data}), over which experts are spread",
            "ExpertMismatch",
            lambda: [
                Proposal(f"use {tensor * data}", {"parallelism": {"expert": tensor * data}}),
                Proposal("remove it to split each expert", {"parallelism": {"expert": None}}),
            ],
            "use other sizes",
        )


def _not_split(
    spec: Spec, catalogue: Catalogue, placement: Placement, shape: Shape | str, config: Mapping[str, Any]
) -> Iterator[Refusal]:
    """Refuse to split a model of Stoker's Transformers backend, which does not support sharding."""
    sizes = placement.sizes
    if spec.engine.runtime != "stoker" or isinstance(shape, Shape) or sizes.tensor * sizes.pipeline == 1:
        return
    names = _read(own_modules, config)
    if names:
        problem = not_split(names)
        yield Refusal(
            "spec.parallelism",
            problem.message,
            problem.reason,
            lambda: (
                *map(Proposal, _unsplit(spec, catalogue, placement, config)),
                *_other_runtimes(spec, catalogue, config),
            ),
            "use a model whose architecture can be split, or accelerators with more memory",
        )


def _other_runtimes(
    spec: Spec, catalogue: Catalogue, config: Mapping[str, Any], *, known: bool = False
) -> Iterator[Proposal]:
    """Propose other runtimes that can run the model; with `known`, only those for which its shape is known."""
    for runtime in sorted(set(catalogue.runtimes) - {spec.engine.runtime}):
        yield from map(Proposal, _elsewhere(spec, catalogue, config, runtime, known))


def _unsplit(spec: Spec, catalogue: Catalogue, placement: Placement, config: Mapping[str, Any]) -> Iterator[str]:
    """Propose engines of one device each, unless the model is quantized or known not to fit on one device.

    The sizes of a model of the Transformers backend are known only if another runtime knows them.
    """
    on_cpu = spec.hardware.accelerator == CPU
    sizes = placement.sizes
    alone = sizes._replace(tensor=1, pipeline=1, data=sizes.data if on_cpu else sizes.used)
    engines = f", data {alone.data}" if alone.data > 1 and not on_cpu else ""
    remedy = f"use tensor 1, pipeline 1{engines}"
    runtimes = (name for name in sorted(catalogue.runtimes) if name != spec.engine.runtime)
    shapes = (shape_of(ModelSource.parse(spec.model.source), config, name) for name in runtimes)
    shape = next((found for found in shapes if isinstance(found, Shape)), None)
    if shape is None:
        yield remedy
        return
    if shape.method:
        return  # the Transformers backend does not load quantized weights
    placed = replace(placement, **alone._asdict(), idle=0)
    memory = memory_bytes_of(spec, placed)
    settings = engine_settings(spec, memory, spec.hardware.accelerator)
    _, bench = bench_of(spec, shape, settings, memory, placed)
    if bench is not None:  # torch's operators take more memory than Stoker's kernels
        bench = replace(bench, numbers=replace(bench.numbers, fused=False))
    if evaluate_option(layout_of(spec, placed, shape, bench), alone).problem is None:
        yield remedy


def _elsewhere(spec: Spec, catalogue: Catalogue, config: Mapping[str, Any], runtime: str, known: bool) -> Iterator[str]:
    """Propose the same spec with another runtime: unchanged, or with the remedy of its only violation."""
    changed_spec = changed(spec, {"engine": {"runtime": runtime, "image": None}})
    if changed_spec is None:
        return  # the spec is not valid with the other runtime
    found = _study(changed_spec, catalogue, config, Shapes(), every_way=False)
    if found.refused or (known and found.unknown):
        return  # the catalogue lacks an image, or the shape is not known
    if not found.unplannable:
        yield f"use runtime: {runtime}"
    elif len(found.unplannable) == 1 and found.chosen.problem is not None:
        yield f"with runtime: {runtime}, {found.unplannable[0].remedy}"


def _length(shape: Shape | str, settings: EngineSettings, estimate: Estimate | None) -> Iterator[Refusal]:
    max_model_len = settings.max_model_len
    if isinstance(shape, Shape) and max_model_len is not None and max_model_len > shape.config.longest_model_len:
        fits = (estimate.max_model_len if estimate else None) or shape.config.longest_model_len
        limit = min(fits, shape.config.longest_model_len)
        yield Refusal(
            "spec.engine.maxModelLen",
            f"{max_model_len:,} exceeds the model's own maximum, {shape.config.longest_model_len:,}",
            "MaxModelLenTooLong",
            lambda: [
                Proposal(f"use at most {limit}", {"engine": {"maxModelLen": limit}}),
                Proposal("remove it", {"engine": {"maxModelLen": None}}),
            ],
            "remove it, also from spec.engine.args",
        )


def _reported_length(estimate: Estimate | None, settings: EngineSettings) -> int | None:
    if settings.max_model_len is not None:
        return settings.max_model_len
    return None if estimate is None or settings.chooses_length else estimate.max_model_len
