"""``stoker plan``: the ways in which a model can share accelerators, and why the others are none.

It judges a manifest (``-f``), or a model and accelerators (``--model``), by the operator's own planner. It needs no
cluster and no network: the shape of a model comes from the table of well-known ones, or from a folder on this machine.
With ``--cluster`` it also reads, from the kubeconfig's cluster, which accelerators there are and are free, and shows
which of them would hold the model; ``--accelerator`` may be left out then.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stoker_operator.api.manifest import documents, parse
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.cli import plan_cluster, yaml_text
from stoker_operator.cli.local_config import local_config
from stoker_operator.cli.manifest_file import add_arguments, parse_planned, read_text
from stoker_operator.cli.plan_answer import PlanReport, document, table
from stoker_operator.cli.plan_flags import add_flags, document_of, flags_given
from stoker_operator.manifests.children import children
from stoker_operator.objects.owner import Owner
from stoker_operator.plan.capacity import capacity
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.placement import Placement
from stoker_operator.plan.planner import Study, plan, study


def main(argv: list[str]) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="stoker plan",
        description="Show how a model can share the accelerators of a replica, and what fits. Exits 2 if what is asked "
        "for cannot be.",
    )
    add_arguments(parser, required=False)
    add_flags(parser)
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="show what the kubeconfig's cluster has and has free, and which of its accelerators would hold the model; "
        "--accelerator may be left out then",
    )
    parser.add_argument("-o", "--output", choices=("table", "json", "yaml"), default="table", help="(default: table)")
    options = parser.parse_args(argv)
    spec_flags = flags_given(options)
    if bool(options.filename) == bool(options.model):
        parser.error("give either -f FILE or --model MODEL")
    if options.filename and spec_flags:
        parser.error(f"{spec_flags[0]} stands in for a manifest; put it into {options.filename}")
    answer = (
        _report_on_cluster(options)
        if options.cluster and options.model and not options.accelerator
        else consider(options)
    )
    print(_formatted(answer, options.output), end="")
    for violation in answer.errors:
        print(f"stoker plan: {violation}", file=sys.stderr)
    return 2 if answer.errors else 0


def consider(options: argparse.Namespace) -> PlanReport:
    """The answer for what the command was given."""
    try:
        catalogue = Catalogue.load(options.catalogue)
        manifest = _manifest(options.filename) if options.filename else document_of(options, catalogue)
    except Refused as refused:
        return PlanReport(None, None, False, refused.violations)
    try:
        spec = parse_planned(manifest, catalogue).spec
    except Refused as refused:
        return _without_sizes(manifest, catalogue, refused.violations)
    try:
        found = study(spec, catalogue, local_config(spec))
    except Refused as refused:
        return PlanReport(spec, None, False, refused.violations)
    answer = _answer(options, manifest, spec, found, catalogue)
    if not options.cluster:
        return answer
    seen = plan_cluster.ask()
    kinds = plan_cluster.rows(seen, manifest, catalogue)
    return replace(answer, cluster=_room_text(seen, found.placement), kinds=kinds)


def _report_on_cluster(options: argparse.Namespace) -> PlanReport:
    """The answer for a model, and whatever accelerators the cluster has."""
    try:
        catalogue = Catalogue.load(options.catalogue)
        manifest = document_of(options, catalogue)
    except Refused as refused:
        return PlanReport(None, None, False, refused.violations)
    seen = plan_cluster.ask()
    kinds = plan_cluster.rows(seen, manifest, catalogue)
    if not kinds:
        problem = seen.unknown or "no node has an accelerator of the catalogue"
        remedy = "name --accelerator, such as cpu with --memory"
        return PlanReport(None, None, False, (Violation("cluster", problem, remedy),), kinds=())
    errors: tuple[Violation, ...] = ()
    if all(kind.option is None for kind in kinds):
        problem = "no accelerator of the cluster can run it so"
        errors = (Violation("spec.hardware", problem, "see why, or use a smaller or quantized model"),)
    return PlanReport(None, None, False, errors, seen.unknown or None, kinds)


def _answer(
    options: argparse.Namespace, manifest: Mapping[str, Any], spec: Spec, found: Study, catalogue: Catalogue
) -> PlanReport:
    """What is said of a spec that was considered."""
    objections = _manifest_objections(manifest, spec, catalogue)
    if options.filename:
        return PlanReport(spec, found, True, objections)
    # Sums are also shown of what this release cannot run: other runtimes' images, pods that nothing connects yet.
    kind = found.placement.accelerator.images
    served = any(kind in images for images in catalogue.runtimes.values())
    errors = (*(() if served else found.refused), *found.unplannable)
    manifest_warnings = [f"a manifest that says so is refused: {each}" for each in objections if each not in errors]
    return PlanReport(spec, replace(found, warnings=(*found.warnings, *manifest_warnings)), True, errors)


def _manifest_objections(manifest: Mapping[str, Any], spec: Spec, catalogue: Catalogue) -> tuple[Violation, ...]:
    """What the operator would say against the manifest."""
    try:
        decided = plan(spec, catalogue, local_config(spec))
        children(Owner(str(manifest["metadata"]["name"])), spec, decided, pod_monitors=True)
    except Refused as refused:
        return refused.violations
    return ()


def _without_sizes(manifest: Mapping[str, Any], catalogue: Catalogue, against: tuple[Violation, ...]) -> PlanReport:
    """The answer for a manifest that is refused: where its sizes are the reason, with those that would do."""
    spec = manifest.get("spec")
    hardware = spec.get("hardware") if isinstance(spec, Mapping) else None
    if not isinstance(spec, Mapping) or not isinstance(hardware, Mapping):
        return PlanReport(None, None, False, against)
    # None: whatever follows from count and nodes. Where that spans nodes, an engine a node is never refused.
    for sizes in (None, {"tensor": hardware.get("count") or 1, "data": hardware.get("nodes") or 1}):
        try:
            parsed = parse({**manifest, "spec": {**spec, "parallelism": sizes}}).spec
            return PlanReport(parsed, study(parsed, catalogue, local_config(parsed)), False, against)
        except Refused:
            continue
    return PlanReport(None, None, False, against)


def _manifest(filename: str) -> Mapping[str, Any]:
    """The one document in the file, not yet judged.

    Raises:
        Refused: it cannot be read, or there are several.
    """
    found = documents(read_text(filename))
    if len(found) > 1:
        names = ", ".join(str((each.get("metadata") or {}).get("name")) for each in found if isinstance(each, Mapping))
        raise Refused(Violation(filename, f"it holds several endpoints ({names})", "put one in a file"))
    if not isinstance(found[0], Mapping):
        parse(found[0])
    return dict(found[0])


def _room_text(seen: plan_cluster.ClusterInventory, placement: Placement) -> str:
    """Whether the cluster's nodes have room for the pods."""
    if seen.unknown:
        return seen.unknown if seen.nodes else f"not known: {seen.unknown}"
    room = capacity(seen.nodes, seen.holders or (), placement.accelerator, placement.count)
    return room or "it has room for a pod now"


def _formatted(answer: PlanReport, output: str) -> str:
    if output == "json":
        return json.dumps(document(answer), indent=2, ensure_ascii=False) + "\n"
    if output == "yaml":
        return yaml_text.dump_all([document(answer)])
    text = table(answer)
    return f"{text}\n" if text else ""
