"""``stoker plan``: the ways in which a model can share accelerators, and why the others are none.

It judges a manifest (``-f``), or a model and accelerators (``--model``), by the operator's own planner. It needs no
cluster and no network: the shape of a model comes from the table of well-known ones, or from a folder on this machine.
With ``--cluster`` the nodes of the cluster that the kubeconfig points at are asked whether they have room.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from stoker_operator.api.manifest import parse
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.cli import yaml_text
from stoker_operator.cli.local_config import local_config
from stoker_operator.cli.manifest_file import add_arguments, read_text
from stoker_operator.cli.plan_answer import Answer, document, table
from stoker_operator.cli.plan_flags import add_flags, document_of, flags_given
from stoker_operator.manifests.children import children
from stoker_operator.manifests.owner import Owner
from stoker_operator.plan.capacity import Holder, capacity
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.placement import Placement
from stoker_operator.plan.planner import plan, study


def main(argv: list[str]) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="stoker plan",
        description="Show how a model can share the accelerators of a replica, and what fits. Exits 2 if what is asked "
        "for cannot be.",
    )
    add_arguments(parser, required=False)
    add_flags(parser)
    parser.add_argument("--cluster", action="store_true", help="ask the nodes of the kubeconfig's cluster for room")
    parser.add_argument("-o", "--output", choices=("table", "json", "yaml"), default="table", help="(default: table)")
    options = parser.parse_args(argv)
    given = flags_given(options)
    if bool(options.filename) == bool(options.model):
        parser.error("give either -f FILE or --model MODEL")
    if options.filename and given:
        parser.error(f"{given[0]} stands in for a manifest; put it into {options.filename}")
    answer = consider(options)
    if answer.study is not None and options.cluster:
        answer = replace(answer, cluster=_room(answer.study.placement))
    print(_said(answer, options.output), end="")
    for violation in answer.errors:
        print(f"stoker plan: {violation}", file=sys.stderr)
    return 2 if answer.errors else 0


def consider(options: argparse.Namespace) -> Answer:
    """The answer for what the command was given."""
    try:
        catalogue = Catalogue.load(options.catalogue)
        asked = _manifest(options.filename) if options.filename else document_of(options, catalogue)
    except Refused as refused:
        return Answer(None, None, False, refused.violations)
    try:
        spec = parse(asked).spec
    except Refused as refused:
        return _without_sizes(asked, catalogue, refused.violations)
    try:
        found = study(spec, catalogue, local_config(spec))
    except Refused as refused:
        return Answer(spec, None, False, refused.violations)
    fate = _fate(asked, spec, catalogue)
    if options.filename:
        return Answer(spec, found, True, fate)
    # Sums are also asked for of what this release cannot run: other runtimes' images, pods that nothing connects yet.
    kind = found.placement.accelerator.images
    served = any(kind in images for images in catalogue.runtimes.values())
    errors = (*(() if served else found.refused), *found.unplannable)
    more = [f"a manifest that says so is refused: {each}" for each in fate if each not in errors]
    return Answer(spec, replace(found, warnings=(*found.warnings, *more)), True, errors)


def _fate(manifest: Mapping[str, Any], spec: Spec, catalogue: Catalogue) -> tuple[Violation, ...]:
    """What the operator would say against the manifest."""
    try:
        decided = plan(spec, catalogue, local_config(spec))
        children(Owner(str(manifest["metadata"]["name"])), spec, decided, pod_monitors=True)
    except Refused as refused:
        return refused.violations
    return ()


def _without_sizes(manifest: Mapping[str, Any], catalogue: Catalogue, against: tuple[Violation, ...]) -> Answer:
    """The answer for a manifest that is refused: where its sizes are the reason, with those that would do."""
    spec = manifest.get("spec")
    hardware = spec.get("hardware") if isinstance(spec, Mapping) else None
    if not isinstance(spec, Mapping) or not isinstance(hardware, Mapping):
        return Answer(None, None, False, against)
    # None: whatever follows from count and nodes. Where that spans nodes, a copy a node is never refused.
    for sizes in (None, {"tensor": hardware.get("count") or 1, "data": hardware.get("nodes") or 1}):
        try:
            parsed = parse({**manifest, "spec": {**spec, "parallelism": sizes}}).spec
            return Answer(parsed, study(parsed, catalogue, local_config(parsed)), False, against)
        except Refused:
            continue
    return Answer(None, None, False, against)


def _manifest(filename: str) -> Mapping[str, Any]:
    """The one document in the file, not yet judged.

    Raises:
        Refused: it cannot be read, or there are several.
    """
    try:
        found = [each for each in yaml.safe_load_all(read_text(filename)) if each is not None]
    except yaml.YAMLError as error:
        raise Refused(Violation("manifest", f"this is not YAML: {error}")) from None
    if len(found) > 1:
        names = ", ".join(str((each.get("metadata") or {}).get("name")) for each in found if isinstance(each, Mapping))
        raise Refused(Violation(filename, f"it holds several endpoints ({names})", "put one in a file"))
    if not found:
        raise Refused(Violation("manifest", "it is empty", "write an InferenceEndpoint"))
    if not isinstance(found[0], Mapping):
        parse(found[0])
    return dict(found[0])


def _room(placement: Placement) -> str:
    """What the cluster's nodes say."""
    # Imported when needed: the Kubernetes client takes a second, and every other plan does without.
    from stoker_operator import observe
    from stoker_operator.kube import Kube, KubeError

    try:
        kube = Kube.connect()
        nodes = [observe.node(each) for each in kube.list("Node").items]
        live = [each for each in kube.list("Pod").items if each["status"].get("phase") not in ("Succeeded", "Failed")]
    except KubeError as error:
        return f"not known: {error}"
    pods = [(f"{each['metadata']['namespace']}/{each['metadata']['name']}", observe.pod(each)) for each in live]
    holders = [Holder(name, pod.node, pod.requests) for name, pod in pods if pod.node and pod.requests]
    return capacity(nodes, holders, placement.accelerator, placement.count) or "it has room for a pod now"


def _said(answer: Answer, output: str) -> str:
    if output == "json":
        return json.dumps(document(answer), indent=2, ensure_ascii=False) + "\n"
    if output == "yaml":
        return yaml_text.dump_all([document(answer)])
    text = table(answer)
    return f"{text}\n" if text else ""
