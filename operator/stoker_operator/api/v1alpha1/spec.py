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
_TWO_PODS: Final = "the claim is for one node, but there may be two pods"


_SHARE: Final = f"use access mode {SHARED}"


def _one_pod(count: str) -> str:
    """Return the settings with which there is at most one pod at a time. `count` is the field with the number of
    replicas."""
    return f"{count} 1 with rollout maxSurge 0 and maxUnavailable 1"


class Spec(Workload):
    """Desired state: the model, the hardware and the serving options."""

    model: Model
    """The served model and its names."""
    auth: Auth | None = None
    """Authentication of clients of the OpenAI-compatible API. Absent: the operator configures no API keys."""
    storage: Storage = Storage()
    """Volumes of the pods: the cache, and shared memory."""
    service: Annotated[Service, NOT_IN_PODS] = Service()
    """The Service in front of the pods. It has the endpoint's name."""
    network_policy: Annotated[NetworkPolicy, NOT_IN_PODS] = NetworkPolicy()
    """Access to the pods' port for the API. The operator's NetworkPolicy allows no other port, such as a sidecar's."""
    rollout: Rollout = Rollout()
    """Options for starting, replacing and terminating pods."""
    monitoring: Annotated[Monitoring, NOT_IN_PODS] = Monitoring()
    """Collection of the pods' metrics."""
    routing: Annotated[Routing, NOT_IN_PODS] = Routing()
    """Routing of requests through the gateway, which serves many endpoints at one address."""
    scaling: Annotated[Scaling | None, NOT_IN_PODS] = None
    """Autoscaling by the load that the gateway reports. Absent: the number of replicas is spec.replicas."""

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
            remedy=f"{_SHARE}, or {_one_pod('replicas')}",
            explain=lambda it: (_TWO_PODS, f"{_SHARE}, or {it.one_pod}" if it.one_pod else _SHARE),
            explain_cel=f"'{_TWO_PODS}; {_SHARE}' + (has(self.hardware.nodes) && self.hardware.nodes > 1 ? '' : "
            f"has(self.scaling) ? ', or {_one_pod('scaling.maxReplicas')}' : ', or {_one_pod('replicas')}')",
        ),
        TARGET_RULE,
        Rule(
            field="networkPolicy",
            holds=lambda it: it.service.type in (None, "ClusterIP") or it.network_policy.lets_outsiders_in,
            cel="!has(self.service) || !has(self.service.type) || self.service.type == 'ClusterIP' || "
            "(has(self.networkPolicy) && (has(self.networkPolicy.from) || "
            "(has(self.networkPolicy.mode) && self.networkPolicy.mode != 'Namespace')))",
            message="a Service of type NodePort or LoadBalancer is for clients that mode Namespace keeps out",
            remedy="set networkPolicy.mode to Open, or list the clients in networkPolicy.from",
        ),
    )
    CHANGES: ClassVar[tuple[ChangeRule, ...]] = (
        ChangeRule(
            field="storage.cache",
            holds=lambda now, before: now.storage.cache_location == before.storage.cache_location,
            cel=f"{_cel_cache_location('self')} == {_cel_cache_location('oldSelf')}",
            message="the cache cannot be moved to another volume",
            remedy="restore it, or delete the endpoint and create it again",
        ),
    )

    @property
    def most_replicas(self) -> int:
        """Maximum number of replicas, without those that a roll-out adds."""
        return self.scaling.max_replicas if self.scaling else self.replicas

    @property
    def first_replicas(self) -> int:
        """Number of replicas of a new endpoint; at least 1 with `scaling`, to show that the model starts."""
        return max(1, self.scaling.fewest) if self.scaling else self.replicas

    @property
    def has_two_pods(self) -> bool:
        """Whether there may be several pods at the same time, also during a roll-out."""
        return self.most_replicas > 1 or self.hardware.pods_per_replica > 1 or self.rollout.surge not in (0, "0%")

    @property
    def one_pod(self) -> str:
        """Settings with which `has_two_pods` is False; empty if each replica has several pods."""
        if self.hardware.pods_per_replica > 1:
            return ""
        return _one_pod("scaling.maxReplicas" if self.scaling else "replicas")

    @property
    def can_share_its_cache(self) -> bool:
        """Whether the claim that the operator creates for the cache can be mounted on several nodes; True if it creates
        none."""
        template = self.storage.cache.volume_claim_template if self.storage.cache else None
        return template is None or template.shared
