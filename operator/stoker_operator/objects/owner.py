"""Names, labels and owner references of an endpoint's objects.

Because of the owner references, Kubernetes by default deletes the objects after the endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from stoker_operator.api.v1alpha1 import API_VERSION, KIND
from stoker_operator.objects.facts import INSTANCE as INSTANCE
from stoker_operator.objects.facts import MAIN, WORKLOAD, Child, object_name

Manifest = dict[str, Any]

MANAGED_BY: Final = {"app.kubernetes.io/managed-by": "stoker"}
#: Label with an object's component, if it has one (`Child.component`).
COMPONENT: Final = "app.kubernetes.io/component"
#: Annotation with the endpoint's generation that last changed an object.
GENERATION: Final = "stoker.dev/generation"
#: Annotation with the name of the operator that manages an object.
OPERATOR: Final = "stoker.dev/operator"


@dataclass(frozen=True)
class Owner:
    """The endpoint that owns objects, and their workload and component.

    Attributes:
        name: the endpoint's name.
        namespace: the endpoint's namespace; None if the manifest has none.
        uid: the endpoint's uid; None if the manifest is not stored yet, so that its objects get no owner reference.
        workload: name of the workload.
        operator: NAMESPACE/NAME of the operator's Lease; empty without one.
        component: see `Child`.
    """

    name: str
    namespace: str | None = None
    uid: str | None = None
    workload: str = MAIN
    operator: str = ""
    component: str = ""

    def of(self, workload: str, component: str = "") -> Owner:
        """Return the owner of the objects of another workload or component."""
        return replace(self, workload=workload, component=component)

    def name_of(self, child: Child) -> str:
        """Return the name of one of the endpoint's objects."""
        return object_name(self.name, child.workload, child.component)

    @property
    def object_name(self) -> str:
        """The name of the workload's objects, or of the component's."""
        return object_name(self.name, self.workload, self.component)

    def selector(self) -> dict[str, str]:
        """Return the labels that select the workload's or component's pods.

        They can never change, because the selector of a Deployment is immutable.
        """
        return {
            "app.kubernetes.io/name": "stoker-engine",
            INSTANCE: self.name,
            WORKLOAD: self.workload,
            **({COMPONENT: self.component} if self.component else {}),
        }

    def labels(self) -> dict[str, str]:
        """Return the labels of the workload's or component's objects."""
        return {**self.selector(), **MANAGED_BY}

    def metadata(self) -> Manifest:
        """Return the metadata of the workload's or component's objects."""
        metadata: Manifest = {"name": self.object_name}
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


def operator_of(live: Mapping[str, Any]) -> str:
    """Return the name of the operator that manages an object; empty if the object has none."""
    return str((live["metadata"].get("annotations") or {}).get(OPERATOR, ""))


def made_of(live: Mapping[str, Any]) -> int:
    """Return the endpoint's generation that last changed an object, or 0 if unknown."""
    generation = str((live["metadata"].get("annotations") or {}).get(GENERATION, ""))
    return int(generation) if generation.isdecimal() and len(generation) < 19 else 0
