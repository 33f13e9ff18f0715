"""``stoker plan -f FILE``: how a model is spread over the accelerators of a pod, or why it cannot be."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from stoker_operator.api.v1alpha1 import InferenceEndpoint
from stoker_operator.api.v1alpha1.parallelism import options as sizes
from stoker_operator.api.violation import Refused
from stoker_operator.cli.manifest_file import add_arguments, load_one
from stoker_operator.manifests.children import children
from stoker_operator.manifests.owner import Owner
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.planner import Plan, plan


def main(argv: list[str]) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="stoker plan",
        description="Show how a manifest's model is spread over the accelerators of a pod. Exits 2 if it cannot be.",
    )
    add_arguments(parser)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="(default: table)")
    options = parser.parse_args(argv)
    try:
        endpoint = load_one(options.filename)
        decided = plan(endpoint.spec, Catalogue.load(options.catalogue))
        children(Owner(endpoint.metadata.name), endpoint.spec, decided)  # refuses what the engine would
    except Refused as refused:
        if options.output == "json":
            print(json.dumps(refusal(refused), indent=2, ensure_ascii=False))
        for violation in refused.violations:
            print(f"stoker plan: {violation}", file=sys.stderr)
        return 2
    if options.output == "json":
        print(json.dumps(acceptance(decided), indent=2))
    else:
        print(table(endpoint, decided))
    return 0


def acceptance(decided: Plan) -> dict[str, Any]:
    """The JSON answer for a manifest that can be planned: every way there is, and the one that is taken."""
    placement = decided.placement
    chosen = (placement.tensor, placement.data)
    return {
        "accepted": True,
        "image": decided.image,
        "options": [
            {"tensor": tensor, "data": data, "verdict": "chosen" if (tensor, data) == chosen else "possible"}
            for tensor, data in sizes(placement.count)
        ],
        "errors": [],
    }


def refusal(refused: Refused) -> dict[str, Any]:
    """The JSON answer for a manifest that cannot."""
    errors = [
        {"field": violation.field, "message": violation.message, "remedy": violation.remedy}
        for violation in refused.violations
    ]
    return {"accepted": False, "options": [], "errors": errors}


def table(endpoint: InferenceEndpoint, decided: Plan) -> str:
    """The answer to read."""
    placement, spec = decided.placement, endpoint.spec
    memory = placement.accelerator.memory_mib
    head = [
        ("model", spec.model.source),
        ("accelerator", spec.hardware.accelerator + (f" ({memory:,} MiB each)" if memory else "")),
        ("pods", f"{spec.replicas}, each with {placement.count}"),
        ("image", decided.image),
    ]
    lines = [f"{name:<13}{value}" for name, value in head] + ["", " TP   DP"]
    for tensor, data in sizes(placement.count):
        chosen = "   ← chosen" if (tensor, data) == (placement.tensor, placement.data) else ""
        lines.append(f"{tensor:>3}{data:>5}{chosen}")
    return "\n".join(lines)
