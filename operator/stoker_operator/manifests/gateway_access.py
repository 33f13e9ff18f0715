"""What the gateway may read in a namespace: the Secrets with the keys of those engines that it serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stoker_operator.objects.owner import MANAGED_BY, OPERATOR, Manifest
from stoker_operator.settings import GatewaySettings

#: The name of the Role and of its RoleBinding. The operator may write no other.
NAME: Final = "stoker-gateway"
_GROUP: Final = "rbac.authorization.k8s.io"


def gateway_access(
    namespace: str, secrets: Sequence[str], gateway: GatewaySettings, operator: str = ""
) -> tuple[Manifest, ...]:
    """The Role that names exactly these Secrets, and who has it, made by `operator`; nothing where there are none."""
    if not secrets:
        return ()
    metadata: Manifest = {"name": NAME, "namespace": namespace, "labels": dict(MANAGED_BY)}
    if operator:
        metadata["annotations"] = {OPERATOR: operator}
    rule = {"apiGroups": [""], "resources": ["secrets"], "resourceNames": list(secrets), "verbs": ["get"]}
    subject = {"kind": "ServiceAccount", "name": gateway.service_account, "namespace": gateway.namespace}
    return (
        {"apiVersion": f"{_GROUP}/v1", "kind": "Role", "metadata": metadata, "rules": [rule]},
        {
            "apiVersion": f"{_GROUP}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": _GROUP, "kind": "Role", "name": NAME},
            "subjects": [subject],
        },
    )
