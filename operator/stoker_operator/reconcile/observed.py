"""The observed state after a decision: the objects, and their pods' progress. The input of the status."""

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
    """The observed state of one workload.

    Attributes:
        rollout: progress of its rollout.
        trouble: why its pods do not serve; None: no problem.
        reported: what its engine reports; None: nothing yet.
        silent: whether a pod is ready and its engine has not reported.
        engines: states of the model's engines, by pod, if several processes compute.
        older: Secrets and ConfigMaps that changed after pods read them.
        objects: the objects that run its pods, in kubectl's notation: ``deployment/demo``.
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
    """The observed state after a decision was applied.

    Attributes:
        live: the existing objects with the names of the endpoint's objects.
        refusal: the API server's messages about rejected objects; empty: none.
        workloads: the workloads that have an object that runs pods, by name.
        route: the gateway's route to the endpoint; None: no gateway is involved.
        serving: name of the workload whose pods answer requests.
        scaling: the endpoint's scaling; None: ``spec.replicas`` sets the number of replicas.
    """

    live: Mapping[Child, Object]
    refusal: str = ""
    workloads: Mapping[str, ObservedWorkload] = field(default_factory=dict)
    route: Route | None = None
    serving: str = MAIN
    scaling: ObservedScaling | None = None

    @property
    def rollout(self) -> Rollout | None:
        """The rollout of the pods that answer requests."""
        serving = self.workloads.get(self.serving)
        return serving.rollout if serving else None

    @property
    def complete(self) -> bool:
        """Whether every pod of every workload serves the newest spec."""
        return self.serving in self.workloads and self.unfinished is None

    @property
    def unfinished(self) -> Rollout | None:
        """The first unfinished rollout; None: all are complete."""
        return next((each.rollout for each in self.workloads.values() if not each.rollout.complete), None)

    @property
    def placed(self) -> bool:
        """Whether every workload has rolled out, even if pods have stopped serving since."""
        return all(each.rollout.complete or each.rollout.placed for each in self.workloads.values())

    @property
    def trouble(self) -> Diagnosis | None:
        """Why pods do not serve; None: no problem."""
        return next((each.trouble for each in self.workloads.values() if each.trouble), None)
