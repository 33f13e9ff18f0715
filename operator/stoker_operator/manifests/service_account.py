"""The identity of an endpoint's pods: one that may do nothing, for policies to point at."""

from __future__ import annotations

from stoker_operator.objects.owner import Manifest, Owner


def service_account(owner: Owner) -> Manifest:
    """The endpoint's ServiceAccount."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": owner.metadata(),
        "automountServiceAccountToken": False,
    }
