"""What ties an endpoint's objects to it: names, labels, and the reference that deletes them with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from stoker_operator.api.v1alpha1 import API_VERSION, KIND
from stoker_operator.objects.facts import INSTANCE as INSTANCE
from stoker_operator.objects.facts import MAIN, WORKLOAD, Child, object_name

Manifest = dict[str, Any]

MANAGED_BY: Final = {"app.kubernetes.io/managed-by": "stoker"}
#: The label that names the component of a workload with several objects of a kind.
COMPONENT: Final = "app.kubernetes.io/component"
#: The annotation that says which generation of the endpoint an object was made of.
GENERATION: Final = "stoker.dev/generation"
#: The annotation that names the operator that made an object.
OPERATOR: Final = "stoker.dev/operator"


@dataclass(frozen=True)
class Owner:
    """The endpoint that objects belong to, and which of its workloads.

    Attributes:
        name: its name.
        namespace: where it and they are; None for a manifest that does not say.
        uid: which object of that name it is; None for a manifest that no API server has seen yet, whose
            objects can be shown but not tied to anything.
        workload: the set of like pods that the objects are for.
        operator: which operator makes them, as NAMESPACE/NAME of its Lease; empty for one that has none.
        component: which of the workload's objects of one kind; empty: it has only one.
    """

    name: str
    namespace: str | None = None
    uid: str | None = None
    workload: str = MAIN
    operator: str = ""
    component: str = ""

    def of(self, workload: str, component: str = "") -> Owner:
        """The owner of another workload's objects, or of one component of it."""
        return replace(self, workload=workload, component=component)

    def name_of(self, child: Child) -> str:
        """The name of one of the endpoint's objects."""
        return object_name(self.name, child.workload, child.component)

    @property
    def object_name(self) -> str:
        """The name of the workload's objects, or of the component's."""
        return object_name(self.name, self.workload, self.component)

    def selector(self) -> dict[str, str]:
        """Labels that pick the workload's pods, or the component's. The selector of what runs them can never change,
        so neither can these."""
        return {
            "app.kubernetes.io/name": "stoker-engine",
            INSTANCE: self.name,
            WORKLOAD: self.workload,
            **({COMPONENT: self.component} if self.component else {}),
        }

    def labels(self) -> dict[str, str]:
        """Labels of everything that belongs to the workload."""
        return {**self.selector(), **MANAGED_BY}

    def metadata(self) -> Manifest:
        """Metadata of an object that belongs to the workload."""
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
    """The operator that made an object in the cluster; empty where it does not say."""
    return str((live["metadata"].get("annotations") or {}).get(OPERATOR, ""))


def made_of(live: Mapping[str, Any]) -> int:
    """The generation of the endpoint that an object in the cluster was made of; 0 where it does not say."""
    generation = str((live["metadata"].get("annotations") or {}).get(GENERATION, ""))
    return int(generation) if generation.isdecimal() and len(generation) < 19 else 0
