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

    SERVING: they answer requests. An endpoint has exactly one workload with this role, to which the Service, the
    PodDisruptionBudget, the scale subresource and the URL belong. SUPPORTING: serving pods use them, as decode pods use
    prefill pods.
    """

    SERVING = "serving"
    SUPPORTING = "supporting"


@dataclass(frozen=True)
class Workload:
    """A set of identical pods of an endpoint.

    Attributes:
        name: its name within the endpoint, in labels and in status.
        spec: the part of the endpoint's spec that concerns these pods.
        kind: the kind of object that runs the pods.
    """

    name: str
    spec: Spec
    kind: WorkloadKind = DEPLOYMENT
    role: Role = Role.SERVING


@dataclass(frozen=True)
class Composition:
    """The workloads of endpoints, and the kinds of their objects.

    Attributes:
        kinds: all kinds of object that may run workloads; these objects are watched.
        workloads: returns the workloads of an endpoint with a given spec.
    """

    kinds: tuple[WorkloadKind, ...] = (DEPLOYMENT,)
    workloads: Callable[[Spec], tuple[Workload, ...]] = lambda spec: (Workload(MAIN, spec),)

    def kind(self, name: str) -> WorkloadKind | None:
        """Return the workload kind called `name`, or None if `kinds` lacks it."""
        return next((each for each in self.kinds if each.name == name), None)


#: The operator's default: one Deployment per endpoint.
ONE_DEPLOYMENT: Final = Composition()
