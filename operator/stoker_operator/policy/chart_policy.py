"""The policy that the Helm chart gives the operator: its defaults, and what a values file changes of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from stoker_operator.api.violation import Refused, Violation
from stoker_operator.policy.policy import Policy

#: What of the chart's values the policy is made of, as `values.yaml` has it.
DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "policy": {"template": "Restricted", "podIds": "Operator"},
    "networkPolicy": {
        "prometheus": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "gateway": [],
    },
    "monitoring": {"kind": "PodMonitor", "endpointLabels": {}},
}


def chart_policy(values: Mapping[str, Any], release: str, namespace: str) -> Policy:
    """The policy of an operator that was installed with `values`.

    Args:
        values: the chart's, where they are not its defaults.
        release: the Helm release's name.
        namespace: the namespace that it is in.

    Raises:
        Refused: what the policy is made of is malformed.
    """
    known = {name: {**part, **_part(values, name)} for name, part in DEFAULTS.items()}
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "podSelector": {
            "matchLabels": {"app.kubernetes.io/name": "stoker-operator", "app.kubernetes.io/instance": release}
        },
    }
    peers = known["networkPolicy"]
    return Policy.of(
        {
            "template": known["policy"]["template"],
            "podIds": known["policy"]["podIds"] or "Operator",
            "podMonitors": known["monitoring"]["kind"] == "PodMonitor",
            "podMonitorLabels": known["monitoring"]["endpointLabels"] or {},
            "networkPolicyFrom": [operator, *(peers["prometheus"] or ()), *(peers["gateway"] or ())],
        },
        "values",
    )


def read_values(file: Path | None) -> Mapping[str, Any]:
    """The values in `file`; none where there is no file.

    Raises:
        Refused: it cannot be read, or is no mapping.
    """
    if file is None:
        return {}
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Refused(Violation(f"values {file}", f"it cannot be read: {error}")) from None
    if not isinstance(values, Mapping):
        raise Refused(Violation(f"values {file}", "it must be a mapping, as the chart's values.yaml is"))
    return values


def _part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = values.get(name) or {}
    if not isinstance(part, Mapping):
        raise Refused(Violation(f"values {name}", "it must be a mapping"))
    return part
