"""Prometheus metrics of the picker."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

#: Bucket bounds in seconds: of decisions, of waits in the queue, and of holds.
_DECISIONS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_WAITS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_HOLDS: Final = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


class PickerMetrics:
    """Metrics of one picker.

    Args:
        registry: Prometheus registry for the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        #: The label ``model`` is empty if the gateway answered the request itself, or rejected it before it had found
        #: the model.
        self.requests = Counter(
            "stoker:gateway_requests",
            "Requests by outcome: routed, answered (by the gateway itself), invalid, unauthorized, not_found, "
            "too_large, unavailable, saturated, limited (by the key), cancelled, failed.",
            ["model", "outcome"],
            registry=registry,
        )
        self.picks = Counter(
            "stoker:gateway_picks",
            "Picked servers by reason: held, session, prefix, home, load.",
            ["model", "why"],
            registry=registry,
        )
        self.prompt_bytes = Counter(
            "stoker:gateway_prompt_bytes", "Bytes of routed prompts.", ["model"], registry=registry
        )
        self.cached_prompt_bytes = Counter(
            "stoker:gateway_cached_prompt_bytes",
            "Bytes of routed prompts that the picked server had received before.",
            ["model"],
            registry=registry,
        )
        self.queue_length = Gauge(
            "stoker:gateway_queue_length",
            "Requests that wait for a server with free capacity.",
            ["model"],
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "stoker:gateway_queue_seconds",
            "Time that requests waited for a server with free capacity.",
            ["model"],
            buckets=_WAITS,
            registry=registry,
        )
        self.held_requests = Gauge(
            "stoker:gateway_held_requests",
            "Requests that wait until a server of an endpoint with scaling is ready.",
            ["model"],
            registry=registry,
        )
        self.held_seconds = Histogram(
            "stoker:gateway_held_seconds",
            "Time that requests waited because no server was ready, by outcome: routed, timed_out, start_failed (no "
            "pod can start), no_room (the limit of held requests is reached), cancelled (the client has disconnected), "
            "refused (for another reason, such as a revoked key). start_failed and no_room include requests that were "
            "rejected without being held, with the time until they were rejected.",
            ["model", "outcome"],
            buckets=_HOLDS,
            registry=registry,
        )
        self.decision_seconds = Histogram(
            "stoker:gateway_decision_seconds",
            "Time from the complete request until a server is chosen, or the request is queued or refused.",
            buckets=_DECISIONS,
            registry=registry,
        )

    def forget(self, model: str) -> None:
        """Remove the queue and hold metrics of a model that is no longer served."""
        for metric in (self.queue_length, self.queue_seconds):
            if (model,) in metric._metrics:
                metric.remove(model)
        self.forget_holds(model)

    def forget_holds(self, model: str) -> None:
        """Remove the hold metrics of a model whose requests are not held."""
        for metric in (self.held_requests, self.held_seconds):
            for labels in [each for each in metric._metrics if each[0] == model]:
                metric.remove(*labels)
