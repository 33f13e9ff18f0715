"""``stoker render -f FILE``: prints every object that the operator would apply, as YAML."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker_common.command_parser import CommandParser
from stoker_operator.api.quantity import canonical
from stoker_operator.api.v1alpha1 import InferenceEndpoint
from stoker_operator.api.violation import Refused
from stoker_operator.cli import yaml_text
from stoker_operator.cli.manifest_file import add_arguments, answer, load
from stoker_operator.manifests.children import children
from stoker_operator.objects.owner import Manifest, Owner
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.planner import plan
from stoker_operator.policy.chart_policy import chart_policy, read_values
from stoker_operator.policy.policy import PERMISSIVE, Policy
from stoker_operator.policy.template_policy import forbidden
from stoker_operator.reconcile.drift import AMOUNTS


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = CommandParser(
        prog="stoker render",
        description="Print every object that the operator would apply for a manifest, without what depends on the "
        "cluster, such as owner references. Without --policy, the policy is that of the Helm chart with the given "
        "values. The policy of a running operator is in its ConfigMap.",
    )
    add_arguments(parser)
    parser.add_argument(
        "--pod-monitors", action="store_true", help="assume that the cluster has PodMonitors (Prometheus operator)"
    )
    known = parser.add_mutually_exclusive_group()
    known.add_argument(
        "--values", type=Path, metavar="FILE", help="values of the Helm chart (default: the chart's own)"
    )
    known.add_argument("--policy", type=Path, metavar="FILE", help="policy of the operator, instead of the chart's")
    parser.add_argument(
        "--release", default="stoker", metavar="NAME", help="release name of the chart (default: stoker)"
    )
    parser.add_argument(
        "--release-namespace", default="stoker", metavar="NAME", help="namespace of the release (default: stoker)"
    )
    options = parser.parse_args(argv)

    def run() -> int:
        catalogue = Catalogue.load(options.catalogue)
        policy = (
            Policy.load(options.policy)
            if options.policy
            else chart_policy(read_values(options.values), options.release, options.release_namespace)
        )
        objects = [
            each
            for endpoint in load(options.filename, catalogue)
            for each in render(endpoint, catalogue, options.pod_monitors, policy)
        ]
        print(yaml_text.dump_all(objects), end="")
        return 0

    return answer("render", run)


def render(
    endpoint: InferenceEndpoint, catalogue: Catalogue, pod_monitors: bool = False, policy: Policy = PERMISSIVE
) -> tuple[Manifest, ...]:
    """Return the objects of one endpoint.

    Args:
        endpoint: the endpoint.
        catalogue: accelerators and runtimes.
        pod_monitors: whether the cluster has PodMonitors; it is assumed to have them if the manifest requires one.
        policy: the administrator's permissions and additions.

    Raises:
        Refused: the manifest is not permitted, or cannot be planned.
    """
    if against := forbidden(endpoint.spec.template, policy.template):
        raise Refused(*against)
    owner, spec = Owner(endpoint.metadata.name, endpoint.metadata.namespace), endpoint.spec
    known = pod_monitors or spec.monitoring.mode == "Enabled"
    return tuple(map(_stored, children(owner, spec, plan(spec, catalogue), pod_monitors=known, policy=policy)))


def _stored(value: Any, is_amount: bool = False) -> Any:
    """Return an object with its quantities in canonical form, as the API server stores them."""
    if isinstance(value, Mapping):
        return {key: _stored(each, is_amount or key in AMOUNTS) for key, each in value.items()}
    if isinstance(value, list):
        return [_stored(each, is_amount) for each in value]
    if not is_amount or not isinstance(value, (int, str)):
        return value
    with contextlib.suppress(ValueError):  # not a quantity, but for example a label that has such a key
        return canonical(value)
    return value
