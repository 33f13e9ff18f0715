"""The ServiceAccount of an endpoint's pods. It has no permissions; policies can refer to it."""

from __future__ import annotations

from stoker_operator.objects.owner import Manifest, Owner


def service_account(owner: Owner) -> Manifest:
    """Return the endpoint's ServiceAccount."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": owner.metadata(),
        "automountServiceAccountToken": False,
    }
