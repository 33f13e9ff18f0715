"""``stoker plan``: how a model can be placed on accelerators, and why other placements are impossible.

The operator's planner evaluates a manifest (``-f``), or a model and accelerators (``--model``). The model's shape comes
from the table of well-known models, or from a local folder, without a network. With ``--cluster`` the command also
reads which accelerators the kubeconfig's cluster has and which are free, and shows which of them can hold the model.
``--plot`` draws how each placement uses the memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stoker_common.bar_chart import BarChart
from stoker_common.command_parser import CommandParser
from stoker_common.model_source import ModelSource
from stoker_operator.api.manifest import documents, parse
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.cli import plan_cluster, yaml_text
from stoker_operator.cli.local_config import local_config
from stoker_operator.cli.manifest_file import add_arguments, parse_planned, read_text
from stoker_operator.cli.plan_answer import PlanReport, document, table
from stoker_operator.cli.plan_flags import add_flags, document_of, flags_given
from stoker_operator.cli.plan_plot import memory_lines
from stoker_operator.manifests.children import children
from stoker_operator.objects.owner import Owner
from stoker_operator.plan import model_shapes
from stoker_operator.plan.capacity import capacity
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.placement import Placement
from stoker_operator.plan.planner import Study, plan, study


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = CommandParser(
        prog="stoker plan",
        description="Show how a model can be placed on the accelerators of a replica, and what fits. Exits with 2 if "
        "the requested placement is impossible.",
    )
    add_arguments(parser, required=False)
    add_flags(parser)
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="show the total and free accelerators of the kubeconfig's cluster, and which of them can hold the model; "
        "--accelerator may then be omitted",
    )
    parser.add_argument("-o", "--output", choices=("table", "json", "yaml"), default="table", help="(default: table)")
    parser.add_argument("--plot", action="store_true", help="also draw how each placement uses an accelerator's memory")
    options = parser.parse_args(argv)
    spec_flags = flags_given(options)
    if bool(options.filename) == bool(options.model):
        parser.error("specify either -f FILE or --model MODEL")
    if options.filename and spec_flags:
        parser.error(f"{spec_flags[0]} cannot be used with -f; set it in {options.filename}")
    if options.plot and options.output != "table":
        parser.error(f"--plot draws below the table; it cannot be used with -o {options.output}")
    if options.plot and options.cluster and options.model and not options.accelerator:
        parser.error("--plot draws the placements on one kind of accelerator; add --accelerator KEY")
    answer = (
        _report_on_cluster(options)
        if options.cluster and options.model and not options.accelerator
        else consider(options)
    )
    print(_formatted(answer, options.output), end="")
    if options.plot and answer.study is not None:
        print("", *memory_lines(answer, BarChart.to(sys.stdout)), sep="\n")
    for violation in answer.errors:
        print(f"stoker plan: {violation}", file=sys.stderr)
    return 2 if answer.errors else 0


def consider(options: argparse.Namespace) -> PlanReport:
    """Return the report for the given manifest or flags."""
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
    """Return the report for a model on each kind of accelerator that the cluster has."""
    try:
        catalogue = Catalogue.load(options.catalogue)
        manifest = document_of(options, catalogue)
    except Refused as refused:
        return PlanReport(None, None, False, refused.violations)
    seen = plan_cluster.ask()
    kinds = plan_cluster.rows(seen, manifest, catalogue)
    if not kinds:
        problem = seen.unknown or "no node has an accelerator of the catalogue"
        remedy = "specify --accelerator, for example cpu with --memory"
        return PlanReport(None, None, False, (Violation("cluster", problem, remedy),), kinds=())
    errors: tuple[Violation, ...] = ()
    if all(kind.option is None for kind in kinds):
        problem = "no accelerator of the cluster can run the model"
        errors = (Violation("spec.hardware", problem, "see the column why, or use a smaller or quantized model"),)
    return PlanReport(None, None, False, errors, seen.unknown or None, kinds)


def _answer(
    options: argparse.Namespace, manifest: Mapping[str, Any], spec: Spec, found: Study, catalogue: Catalogue
) -> PlanReport:
    """Return the report for a spec that was studied."""
    objections = _manifest_objections(manifest, spec, catalogue)
    found = replace(found, warnings=(*_unchecked_model(spec), *found.warnings))
    if options.filename:
        return PlanReport(spec, found, True, objections)
    # Placements that this release cannot run (no runtime has an image, or over several pods) only cause warnings.
    kind = found.placement.accelerator.images
    served = any(kind in images for images in catalogue.runtimes.values())
    errors = (*(() if served else found.refused), *found.unplannable)
    manifest_warnings = [
        f"a manifest with these settings is refused: {each}" for each in objections if each not in errors
    ]
    return PlanReport(spec, replace(found, warnings=(*found.warnings, *manifest_warnings)), True, errors)


def _unchecked_model(spec: Spec) -> tuple[str, ...]:
    """Warn of a hub model that is not well-known: the command contacts no hub, so its config.json is not known."""
    source = ModelSource.parse(spec.model.source)
    if source.scheme != "hf" or source.name in model_shapes.table():
        return ()
    return (
        f"nothing about {source.name} was checked, because its config.json is not known here; download it (`hf "
        f"download {source.name} config.json --local-dir FOLDER`) and plan with --model FOLDER",
    )


def _manifest_objections(manifest: Mapping[str, Any], spec: Spec, catalogue: Catalogue) -> tuple[Violation, ...]:
    """Return the violations for which an operator without a policy would refuse the manifest."""
    try:
        decided = plan(spec, catalogue, local_config(spec))
        children(Owner(str(manifest["metadata"]["name"])), spec, decided, pod_monitors=True)
    except Refused as refused:
        return refused.violations
    return ()


def _without_sizes(manifest: Mapping[str, Any], catalogue: Catalogue, against: tuple[Violation, ...]) -> PlanReport:
    """Return the report for a refused manifest. If its parallel sizes are the reason, other sizes are evaluated."""
    spec = manifest.get("spec")
    hardware = spec.get("hardware") if isinstance(spec, Mapping) else None
    if not isinstance(spec, Mapping) or not isinstance(hardware, Mapping):
        return PlanReport(None, None, False, against)
    # None: tensor is count × nodes. If that is refused, one engine per node may be valid.
    for sizes in (None, {"tensor": hardware.get("count") or 1, "data": hardware.get("nodes") or 1}):
        try:
            parsed = parse({**manifest, "spec": {**spec, "parallelism": sizes}}).spec
            return PlanReport(parsed, study(parsed, catalogue, local_config(parsed)), False, against)
        except Refused:
            continue
    return PlanReport(None, None, False, against)


def _manifest(filename: str) -> Mapping[str, Any]:
    """Return the file's single document, which must be a mapping and is not checked further.

    Raises:
        Refused: the file cannot be read, has several documents, or its document is not a mapping.
    """
    found = documents(read_text(filename))
    if len(found) > 1:
        names = ", ".join(str((each.get("metadata") or {}).get("name")) for each in found if isinstance(each, Mapping))
        raise Refused(
            Violation(filename, f"the file contains several endpoints ({names})", "put each into its own file")
        )
    if not isinstance(found[0], Mapping):
        parse(found[0])
    return dict(found[0])


def _room_text(seen: plan_cluster.ClusterInventory, placement: Placement) -> str:
    """Describe whether the cluster's nodes have room for a pod, or why this is unknown."""
    if seen.unknown:
        return seen.unknown if seen.nodes else f"unknown: {seen.unknown}"
    room = capacity(seen.nodes, seen.holders or (), placement.accelerator, placement.count)
    return room or "has room for a pod now"


def _formatted(answer: PlanReport, output: str) -> str:
    if output == "json":
        return json.dumps(document(answer), indent=2, ensure_ascii=False) + "\n"
    if output == "yaml":
        return yaml_text.dump_all([document(answer)])
    text = table(answer)
    return f"{text}\n" if text else ""
