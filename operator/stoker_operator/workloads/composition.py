"""Of which workloads an endpoint consists: today of one Deployment."""

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
    """What a workload's pods are for.

    SERVING: they answer requests. The Service, the PodDisruptionBudget, the scale subresource and the URL are of this
    workload; an endpoint has exactly one. SUPPORTING: the serving pods use them, as decode pods use those of prefill.
    """

    SERVING = "serving"
    SUPPORTING = "supporting"


@dataclass(frozen=True)
class Workload:
    """A set of like pods of an endpoint.

    Attributes:
        name: its name within the endpoint, in labels and in status.
        spec: the endpoint's spec, as far as it is about these pods: only a change of this restarts them.
        kind: what runs them.
        role: what they are for.
    """

    name: str
    spec: Spec
    kind: WorkloadKind = DEPLOYMENT
    role: Role = Role.SERVING


@dataclass(frozen=True)
class Composition:
    """How endpoints are composed.

    Attributes:
        kinds: all kinds that workloads may be of; their objects are watched.
        workloads: the workloads of an endpoint with this spec.
    """

    kinds: tuple[WorkloadKind, ...] = (DEPLOYMENT,)
    workloads: Callable[[Spec], tuple[Workload, ...]] = lambda spec: (Workload(MAIN, spec),)

    def kind(self, name: str) -> WorkloadKind | None:
        """The kind of this name; None for objects that run no pods."""
        return next((each for each in self.kinds if each.name == name), None)


#: What the operator makes of an endpoint: one Deployment.
ONE_DEPLOYMENT: Final = Composition()
