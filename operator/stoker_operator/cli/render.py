"""``stoker render -f FILE``: every object that the operator would apply, as YAML."""

from __future__ import annotations

import argparse
from pathlib import Path

from stoker_operator.api.v1alpha1 import InferenceEndpoint
from stoker_operator.api.violation import Refused
from stoker_operator.cli import yaml_text
from stoker_operator.cli.manifest_file import add_arguments, answer, load
from stoker_operator.manifests.children import children
from stoker_operator.manifests.owner import Manifest, Owner
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.planner import plan
from stoker_operator.policy import PERMISSIVE, Policy
from stoker_operator.template_policy import forbidden


def main(argv: list[str]) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="stoker render",
        description="Print every object that the operator would apply for a manifest. What only exists in a cluster, "
        "the owner references, is left out.",
    )
    add_arguments(parser)
    parser.add_argument(
        "--pod-monitors", action="store_true", help="the cluster has the Prometheus operator, and so PodMonitors"
    )
    parser.add_argument("--policy", type=Path, metavar="FILE", help="that the operator runs with")
    options = parser.parse_args(argv)

    def run() -> int:
        catalogue, policy = Catalogue.load(options.catalogue), Policy.load(options.policy)
        objects = [
            each
            for endpoint in load(options.filename)
            for each in render(endpoint, catalogue, options.pod_monitors, policy)
        ]
        print(yaml_text.dump_all(objects), end="")
        return 0

    return answer("render", run)


def render(
    endpoint: InferenceEndpoint, catalogue: Catalogue, pod_monitors: bool = False, policy: Policy = PERMISSIVE
) -> tuple[Manifest, ...]:
    """The objects of one endpoint.

    Args:
        endpoint: the endpoint.
        catalogue: the accelerators there are.
        pod_monitors: whether the cluster has PodMonitors; a manifest that requires one gets one.
        policy: what the administrator permits and adds.

    Raises:
        Refused: it cannot be run as written.
    """
    if against := forbidden(endpoint.spec.template, policy.template):
        raise Refused(*against)
    owner, spec = Owner(endpoint.metadata.name, endpoint.metadata.namespace), endpoint.spec
    known = pod_monitors or spec.monitoring.mode == "Enabled"
    return children(owner, spec, plan(spec, catalogue), pod_monitors=known, policy=policy)
