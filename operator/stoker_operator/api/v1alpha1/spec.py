"""The spec of an endpoint."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from stoker_operator.api.rule import ChangeRule, Rule
from stoker_operator.api.v1alpha1.auth import Auth
from stoker_operator.api.v1alpha1.base import NOT_IN_PODS
from stoker_operator.api.v1alpha1.claim import SHARED
from stoker_operator.api.v1alpha1.exposure import Service
from stoker_operator.api.v1alpha1.model import Model
from stoker_operator.api.v1alpha1.monitoring import Monitoring
from stoker_operator.api.v1alpha1.network_policy import NetworkPolicy
from stoker_operator.api.v1alpha1.rollout import Rollout
from stoker_operator.api.v1alpha1.routing import Routing
from stoker_operator.api.v1alpha1.scaling import TARGET_RULE, Scaling
from stoker_operator.api.v1alpha1.storage import Storage
from stoker_operator.api.v1alpha1.workload import Workload


def _cel_cache_location(spec: str) -> str:
    """`Storage.cache_location` in CEL."""
    cache = f"{spec}.storage.cache"
    claim = f"{cache}.persistentVolumeClaim"
    has_cache = f"has({spec}.storage) && has({cache})"
    return (
        f"({has_cache} && has({cache}.volumeClaimTemplate) ? 'made' : "
        f"{has_cache} && has({claim}) ? 'claim ' + {claim}.claimName : 'node')"
    )


_CEL_MOST_REPLICAS: Final = "(has(self.scaling) ? self.scaling.maxReplicas : self.replicas)"
_TWO_PODS: Final = "this claim is for one pod, and there may be two"


def _one_pod(field: str) -> str:
    """What to write where a claim is for one pod."""
    return f"use access mode {SHARED}, or {field} 1 with rollout maxSurge 0 and maxUnavailable 1"


class Spec(Workload):
    """What is served, on what, and how."""

    model: Model
    """Which model is served, and by which names."""
    auth: Auth | None = None
    """Who may use the API. Absent: every client that reaches the Service."""
    storage: Storage = Storage()
    """Storage of each pod."""
    service: Annotated[Service, NOT_IN_PODS] = Service()
    """The Service in front of the pods. It has the endpoint's name."""
    network_policy: Annotated[NetworkPolicy, NOT_IN_PODS] = NetworkPolicy()
    """Who reaches the port that serves the API. Other ports of the pods are closed, those of sidecars too."""
    rollout: Rollout = Rollout()
    """How pods are replaced when the spec changes."""
    monitoring: Annotated[Monitoring, NOT_IN_PODS] = Monitoring()
    """How metrics are collected."""
    routing: Annotated[Routing, NOT_IN_PODS] = Routing()
    """How requests come through the gateway, one address for all models."""
    scaling: Annotated[Scaling | None, NOT_IN_PODS] = None
    """How many replicas there are, by what the gateway reports of requests. Absent: spec.replicas."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        *Workload.RULES,
        Rule(
            field="storage.cache",
            holds=lambda it: not it.has_two_pods or it.can_share_its_cache,
            cel="!has(self.storage) || !has(self.storage.cache) || !has(self.storage.cache.volumeClaimTemplate) || "
            f"'{SHARED}' in self.storage.cache.volumeClaimTemplate.spec.accessModes || ("
            f"{_CEL_MOST_REPLICAS} < 2 && has(self.rollout) && has(self.rollout.maxSurge) && "
            "(self.rollout.maxSurge == 0 || self.rollout.maxSurge == '0%') && "
            "(!has(self.hardware.nodes) || self.hardware.nodes == 1))",
            message=_TWO_PODS,
            remedy=_one_pod("replicas"),
            explain=lambda it: (_TWO_PODS, _one_pod("scaling.maxReplicas" if it.scaling else "replicas")),
            explain_cel=f"has(self.scaling) ? '{_TWO_PODS}; {_one_pod('scaling.maxReplicas')}' : "
            f"'{_TWO_PODS}; {_one_pod('replicas')}'",
        ),
        TARGET_RULE,
        Rule(
            field="networkPolicy",
            holds=lambda it: it.service.type in (None, "ClusterIP") or it.network_policy.lets_outsiders_in,
            cel="!has(self.service) || !has(self.service.type) || self.service.type == 'ClusterIP' || "
            "(has(self.networkPolicy) && (has(self.networkPolicy.from) || "
            "(has(self.networkPolicy.mode) && self.networkPolicy.mode != 'Namespace')))",
            message="a Service of type NodePort or LoadBalancer is for clients that mode Namespace keeps out",
            remedy="set networkPolicy.mode to Open, or list in networkPolicy.from who may come",
        ),
    )
    CHANGES: ClassVar[tuple[ChangeRule, ...]] = (
        ChangeRule(
            field="storage.cache",
            holds=lambda now, before: now.storage.cache_location == before.storage.cache_location,
            cel=f"{_cel_cache_location('self')} == {_cel_cache_location('oldSelf')}",
            message="the cache cannot be changed",
            remedy="restore it, or delete the endpoint and create it again",
        ),
    )

    @property
    def most_replicas(self) -> int:
        """The most replicas that there may be, without those that a roll-out adds."""
        return self.scaling.max_replicas if self.scaling else self.replicas

    @property
    def first_replicas(self) -> int:
        """The replicas of a new endpoint. Where `scaling` permits none, the first one shows that the model starts."""
        return max(1, self.scaling.fewest) if self.scaling else self.replicas

    @property
    def has_two_pods(self) -> bool:
        """Whether there may be two pods at the same time, if only while they are replaced."""
        return self.most_replicas > 1 or self.hardware.pods_per_replica > 1 or self.rollout.surge not in (0, "0%")

    @property
    def can_share_its_cache(self) -> bool:
        """Whether the claim that is made for the cache may be mounted on several nodes; True where none is made."""
        template = self.storage.cache.volume_claim_template if self.storage.cache else None
        return template is None or template.shared
