"""The gateway's permissions in a namespace: to read the Secrets with the API keys of the endpoints that it serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stoker_operator.objects.owner import MANAGED_BY, OPERATOR, Manifest
from stoker_operator.settings import GatewaySettings

#: Name of the Role and of its RoleBinding. The operator has no permission to write others.
NAME: Final = "stoker-gateway"
_GROUP: Final = "rbac.authorization.k8s.io"


def gateway_access(
    namespace: str, secrets: Sequence[str], gateway: GatewaySettings, operator: str = ""
) -> tuple[Manifest, ...]:
    """Return the Role that names exactly these Secrets, and its RoleBinding; nothing without Secrets.

    Both have an annotation with the `operator` that manages them, unless it is empty.
    """
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
