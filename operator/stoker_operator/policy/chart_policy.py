"""The policy of an operator that the Helm chart installs, computed from a values file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from stoker_operator.api.violation import Refused, Violation
from stoker_operator.policy.policy import Policy

#: The chart's values that make up the policy, with the defaults of `values.yaml`.
DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "policy": {"template": "Restricted", "podIds": "Operator"},
    "networkPolicy": {
        "prometheus": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "gateway": [],
    },
    "monitoring": {"kind": "PodMonitor", "endpointLabels": {}},
}


def chart_policy(values: Mapping[str, Any], release: str, namespace: str) -> Policy:
    """Return the policy of an operator that was installed with `values`.

    Args:
        values: the content of a values file.
        release: name of the Helm release.
        namespace: namespace of the Helm release.

    Raises:
        Refused: a value of the policy is malformed.
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
    """Return the values in `file`; empty if it is None.

    Raises:
        Refused: the file cannot be read, or is not a mapping.
    """
    if file is None:
        return {}
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Refused(Violation(f"values {file}", f"the file cannot be read: {error}")) from None
    if not isinstance(values, Mapping):
        raise Refused(Violation(f"values {file}", "the file must be a mapping, like the chart's values.yaml"))
    return values


def _part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = values.get(name) or {}
    if not isinstance(part, Mapping):
        raise Refused(Violation(f"values {name}", "the value must be a mapping"))
    return part
