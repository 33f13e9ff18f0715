"""What came of a decision: the objects, and how far their pods have got. The input of the status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker_operator.objects.facts import (
    MAIN,
    Child,
    EngineStates,
    Object,
    OlderObject,
    Reported,
    Rollout,
)
from stoker_operator.reconcile.diagnosis import Diagnosis
from stoker_operator.reconcile.routing import Route
from stoker_operator.reconcile.scaling_status import ObservedScaling


@dataclass(frozen=True)
class ObservedWorkload:
    """What came of one workload.

    Attributes:
        rollout: how far it has got.
        trouble: why its pods do not serve.
        reported: what its engine reports, where it has.
        silent: a pod is ready, and its engine has not reported.
        engines: of the model, by pod, where several processes compute.
        older: Secrets and ConfigMaps of which pods run with an earlier state.
        objects: what runs its pods, as kubectl takes it: ``deployment/demo``.
    """

    rollout: Rollout
    trouble: Diagnosis | None = None
    reported: Reported | None = None
    silent: bool = False
    engines: Mapping[str, EngineStates] = field(default_factory=dict)
    older: tuple[OlderObject, ...] = ()
    objects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Observed:
    """What came of a decision.

    Attributes:
        live: the objects that have the names of the endpoint's.
        refusal: what the API server said of one that it would not take.
        workloads: those of which there is an object that runs pods, by name.
        route: whether the gateway serves the endpoint, where there is something to say.
        serving: the name of the workload whose pods answer requests.
        scaling: how the endpoint is scaled; None: ``spec.replicas`` says how many there are.
    """

    live: Mapping[Child, Object]
    refusal: str = ""
    workloads: Mapping[str, ObservedWorkload] = field(default_factory=dict)
    route: Route | None = None
    serving: str = MAIN
    scaling: ObservedScaling | None = None

    @property
    def rollout(self) -> Rollout | None:
        """How far the pods that answer requests have got."""
        serving = self.workloads.get(self.serving)
        return serving.rollout if serving else None

    @property
    def complete(self) -> bool:
        """Whether every pod of every workload serves from the newest spec."""
        return self.serving in self.workloads and self.unfinished is None

    @property
    def unfinished(self) -> Rollout | None:
        """A rollout that goes on."""
        return next((each.rollout for each in self.workloads.values() if not each.rollout.complete), None)

    @property
    def placed(self) -> bool:
        """Whether every workload has rolled out, be it that pods have ceased to serve since."""
        return all(each.rollout.complete or each.rollout.placed for each in self.workloads.values())

    @property
    def trouble(self) -> Diagnosis | None:
        """Why pods do not serve."""
        return next((each.trouble for each in self.workloads.values() if each.trouble), None)
