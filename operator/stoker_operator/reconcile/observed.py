"""The observed state after a decision: the objects, and their pods' progress. An input of the status."""

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
        trouble: why its pods are not ready, or None if no problem is known.
        reported: the facts that its engine has reported, or None while there are none.
        silent: whether a pod is ready and its engine has not reported.
        engines: states of the engines, by pod, for pods in which several processes compute.
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
        refusal: the API server's messages about rejected objects; empty if none was rejected.
        workloads: the workloads that have an object that runs pods, by name.
        route: the gateway's route to the endpoint, or None if no gateway is involved.
        serving: name of the workload whose pods answer requests.
        scaling: the endpoint's scaling, or None without ``spec.scaling`` or if the spec cannot be parsed.
    """

    live: Mapping[Child, Object]
    refusal: str = ""
    workloads: Mapping[str, ObservedWorkload] = field(default_factory=dict)
    route: Route | None = None
    serving: str = MAIN
    scaling: ObservedScaling | None = None

    @property
    def rollout(self) -> Rollout | None:
        """The rollout of the pods that answer requests, if they have a workload object."""
        serving = self.workloads.get(self.serving)
        return serving.rollout if serving else None

    @property
    def complete(self) -> bool:
        """Whether every pod of every workload runs the newest spec and is available."""
        return self.serving in self.workloads and self.unfinished is None

    @property
    def unfinished(self) -> Rollout | None:
        """The first unfinished rollout, or None if all are complete."""
        return next((each.rollout for each in self.workloads.values() if not each.rollout.complete), None)

    @property
    def placed(self) -> bool:
        """Whether every workload has rolled out, even if pods have become unready since."""
        return all(each.rollout.complete or each.rollout.placed for each in self.workloads.values())

    @property
    def trouble(self) -> Diagnosis | None:
        """Why pods are not ready, or None if no problem is known."""
        return next((each.trouble for each in self.workloads.values() if each.trouble), None)
