"""What the administrator permits endpoints, and adds to their objects: a file, of the Helm chart for example."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import ValidationError

from stoker_operator.api.rule import violations
from stoker_operator.api.v1alpha1.base import Labels, Part
from stoker_operator.api.v1alpha1.network_policy import NetworkPolicyPeer
from stoker_operator.api.violation import Refused, Violation

#: What of ``spec.template`` may be used.
TemplateUse = Literal["Full", "Restricted", "None"]
#: Who chooses the user and the group that pods run as.
PodIds = Literal["Operator", "Cluster"]


class Policy(Part):
    """The file's content; each field may be left out.

    Attributes:
        template: what ``spec.template`` may hold. Full: whatever the API server takes. Restricted: what
            `template_policy` lists. None: nothing.
        pod_ids: who chooses the user and the group that pods run as. Operator: pods have runAsUser and fsGroup.
            Cluster: they have neither, and admission sets them, as OpenShift's restricted-v2 does.
        network_policy_from: who may send requests to every endpoint of ``networkPolicy.mode`` Namespace, beside pods of
            its namespace: the operator, Prometheus, a gateway.
        pod_monitors: whether an endpoint whose ``monitoring.podMonitor`` is Auto has one where the cluster has them.
            Absent: it has.
        pod_monitor_labels: of endpoints' PodMonitors, beside ours.
    """

    template: TemplateUse = "Full"
    pod_ids: PodIds = "Operator"
    network_policy_from: list[NetworkPolicyPeer] | None = None
    pod_monitors: bool | None = None
    pod_monitor_labels: Labels | None = None

    @classmethod
    def load(cls, file: Path | None) -> Policy:
        """The policy in `file`; where there is none, everything is permitted and nothing added.

        Raises:
            Refused: the file is no policy.
        """
        if file is None:
            return PERMISSIVE
        field = f"policy {file}"
        try:
            content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise Refused(Violation(field, f"it cannot be read: {error}")) from None
        return cls.of(content, field)

    @classmethod
    def of(cls, content: Any, field: str) -> Policy:
        """The policy that `content` is.

        Args:
            field: what an error calls it.

        Raises:
            Refused: it is no policy.
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


#: Everything is permitted and nothing added: where there is no file.
PERMISSIVE: Final = Policy()
