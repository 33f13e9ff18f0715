"""The composition of an endpoint from workloads: at present one Deployment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.objects.facts import MAIN
from stoker_operator.workloads.deployment import DEPLOYMENT
from stoker_operator.workloads.kind import WorkloadKind


class Role(Enum):
    """The role of a workload's pods.

    SERVING: they answer requests. The Service, the PodDisruptionBudget, the scale subresource and the URL belong to
    this workload; an endpoint has exactly one. SUPPORTING: serving pods use them, as decode pods use prefill pods.
    """

    SERVING = "serving"
    SUPPORTING = "supporting"


@dataclass(frozen=True)
class Workload:
    """A set of identical pods of an endpoint.

    Attributes:
        name: its name within the endpoint, in labels and in status.
        spec: the part of the endpoint's spec that concerns these pods; only a change of it restarts them.
        kind: the kind of object that runs the pods.
        role: the pods' role.
    """

    name: str
    spec: Spec
    kind: WorkloadKind = DEPLOYMENT
    role: Role = Role.SERVING


@dataclass(frozen=True)
class Composition:
    """The composition of endpoints.

    Attributes:
        kinds: all kinds of object that may run workloads; these objects are watched.
        workloads: returns the workloads of an endpoint with a given spec.
    """

    kinds: tuple[WorkloadKind, ...] = (DEPLOYMENT,)
    workloads: Callable[[Spec], tuple[Workload, ...]] = lambda spec: (Workload(MAIN, spec),)

    def kind(self, name: str) -> WorkloadKind | None:
        """Return the kind of this name, or None if objects with this name run no pods."""
        return next((each for each in self.kinds if each.name == name), None)


#: The operator's default: one Deployment per endpoint.
ONE_DEPLOYMENT: Final = Composition()
