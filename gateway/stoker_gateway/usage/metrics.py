"""What keys use, for Prometheus. Only keys that there are have series, so that there are not more and more of them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter

from stoker_gateway.usage.completed_request import CompletedRequest


class UsageMetrics:
    """Metrics of one gateway.

    Args:
        registry: that they are in.
        keys: ids of the keys there are; none where there are no keys, and who asks is not known.
    """

    def __init__(self, registry: CollectorRegistry, keys: Iterable[str] = ()) -> None:
        self.tokens = Counter(
            "stoker:gateway_tokens", "Tokens of requests that have ended.", ["key", "model", "kind"], registry=registry
        )
        #: By the status of the answer; 0: there was none.
        self.requests = Counter(
            "stoker:gateway_key_requests",
            "Routed requests that have ended.",
            ["key", "model", "code"],
            registry=registry,
        )
        self._keys: frozenset[str] = frozenset()
        self.set_keys(keys)

    def set_keys(self, keys: Iterable[str]) -> None:
        """These are all keys there are. The series of others go, also if one of their requests ends later."""
        before, self._keys = self._keys, frozenset(keys) | {""}
        for key in before - self._keys:
            self._forget("key", key)

    def forget_model(self, model: str) -> None:
        """The model is not served any more."""
        self._forget("model", model)

    def ended(self, ended: CompletedRequest) -> None:
        """Counts a request."""
        if ended.key not in self._keys:
            return
        self.requests.labels(ended.key, ended.model, str(ended.status)).inc()
        used = ended.tokens
        for kind, count in (("prompt", used.prompt), ("cached", used.cached), ("output", used.output)):
            self.tokens.labels(ended.key, ended.model, kind).inc(count)

    def _forget(self, label: str, value: str) -> None:
        for metric in (self.tokens, self.requests):
            metric.remove_by_labels({label: value})
