"""The administrator's policy: what endpoints may use, and what is added to their objects.

It is read from a file, such as that of the Helm chart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import ValidationError

from stoker_operator.api.rule import violations
from stoker_operator.api.v1alpha1.base import Labels, Part
from stoker_operator.api.v1alpha1.network_policy import NetworkPolicyPeer
from stoker_operator.api.violation import Refused, Violation

#: Which fields of ``spec.template`` may be used.
TemplateUse = Literal["Full", "Restricted", "None"]
#: Source of the user and group ids of pods.
PodIds = Literal["Operator", "Cluster"]


class Policy(Part):
    """The administrator's policy; each field is optional.

    Attributes:
        template: permitted content of ``spec.template``. Full: everything that the API server accepts. Restricted: the
            fields in `template_policy`. None: nothing.
        pod_ids: source of the user and group ids of pods. Operator: the operator sets fsGroup, and runAsUser if the
            runtime's images need it. Cluster: an admission controller sets them, such as OpenShift's.
        network_policy_from: additional clients, such as Prometheus, that may send requests to every endpoint with
            ``networkPolicy.mode`` Namespace. Pods in the endpoint's namespace always may.
        pod_monitors: whether endpoints with ``monitoring.podMonitor`` Auto get a PodMonitor if the cluster has this
            kind. Absent: they do.
        pod_monitor_labels: additional labels of endpoints' PodMonitors.
    """

    template: TemplateUse = "Full"
    pod_ids: PodIds = "Operator"
    network_policy_from: list[NetworkPolicyPeer] | None = None
    pod_monitors: bool | None = None
    pod_monitor_labels: Labels | None = None

    @classmethod
    def load(cls, file: Path | None) -> Policy:
        """Return the policy in `file`; without a file, everything is permitted and nothing is added.

        Raises:
            Refused: the file cannot be read, or is not a policy.
        """
        if file is None:
            return PERMISSIVE
        field = f"policy {file}"
        try:
            content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise Refused(Violation(field, f"the file cannot be read: {error}")) from None
        return cls.of(content, field)

    @classmethod
    def of(cls, content: Any, field: str) -> Policy:
        """Return the policy that `content` describes.

        Args:
            content: parsed YAML.
            field: name of the source in errors.

        Raises:
            Refused: `content` is not a policy.
        """
        try:
            policy = cls.model_validate(content)
        except ValidationError as error:
            faults = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            raise Refused(*(Violation(field, fault) for fault in faults)) from None
        broken = tuple(Violation(field, str(each)) for each in violations(policy))
        if broken:
            raise Refused(*broken)
        return policy


#: The policy without a file: everything is permitted and nothing is added.
PERMISSIVE: Final = Policy()
