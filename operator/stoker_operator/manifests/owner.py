"""What ties an endpoint's objects to it: names, labels, and the reference that deletes them with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from stoker_operator.api.v1alpha1 import API_VERSION, KIND

Manifest = dict[str, Any]

MANAGED_BY: Final = {"app.kubernetes.io/managed-by": "stoker"}
#: The label that names the endpoint an object belongs to.
INSTANCE: Final = "app.kubernetes.io/instance"


@dataclass(frozen=True)
class Owner:
    """The endpoint that objects belong to.

    Attributes:
        name: its name, which is also theirs.
        namespace: where it and they are; None for a manifest that does not say.
        uid: which object of that name it is; None for a manifest that no API server has seen yet, whose
            objects can be shown but not tied to anything.
    """

    name: str
    namespace: str | None = None
    uid: str | None = None

    def selector(self) -> dict[str, str]:
        """Labels that pick the endpoint's pods. A Deployment's selector can never change, so neither can these."""
        return {
            "app.kubernetes.io/name": "stoker-engine",
            INSTANCE: self.name,
            "stoker.dev/workload": "main",
        }

    def labels(self) -> dict[str, str]:
        """Labels of everything that belongs to the endpoint."""
        return {**self.selector(), **MANAGED_BY}

    def metadata(self) -> Manifest:
        """Metadata of an object that belongs to the endpoint."""
        metadata: Manifest = {"name": self.name}
        if self.namespace:
            metadata["namespace"] = self.namespace
        metadata["labels"] = self.labels()
        if self.uid:
            metadata["ownerReferences"] = [
                {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": self.name,
                    "uid": self.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ]
        return metadata
