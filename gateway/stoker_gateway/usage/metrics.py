"""Prometheus metrics of the keys' usage. Only current keys have series, so that the number of series does not grow."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter

from stoker_gateway.usage.completed_request import CompletedRequest


class UsageMetrics:
    """Usage metrics of one gateway.

    Args:
        keys: ids of the current keys; empty if requests need no key.
    """

    def __init__(self, registry: CollectorRegistry, keys: Iterable[str] = ()) -> None:
        self.tokens = Counter(
            "stoker:gateway_tokens",
            "Tokens of requests that have ended, by kind: prompt, cached (the cached part of the prompts), output.",
            ["key", "model", "kind"],
            registry=registry,
        )
        self.requests = Counter(
            "stoker:gateway_key_requests",
            "Routed requests that have ended, by the status of the response; 0 if there was no response.",
            ["key", "model", "code"],
            registry=registry,
        )
        self._keys: frozenset[str] = frozenset()
        self.set_keys(keys)

    def set_keys(self, keys: Iterable[str]) -> None:
        """Set the current keys. The series of other keys are removed, and their later requests create no new series."""
        before, self._keys = self._keys, frozenset(keys) | {""}
        for key in before - self._keys:
            self._forget("key", key)

    def forget_model(self, model: str) -> None:
        """Remove the series of a model that is no longer served."""
        self._forget("model", model)

    def ended(self, ended: CompletedRequest) -> None:
        """Count a completed request, unless its key is no longer current."""
        if ended.key not in self._keys:
            return
        self.requests.labels(ended.key, ended.model, str(ended.status)).inc()
        used = ended.tokens
        for kind, count in (("prompt", used.prompt), ("cached", used.cached), ("output", used.output)):
            self.tokens.labels(ended.key, ended.model, kind).inc(count)

    def _forget(self, label: str, value: str) -> None:
        for metric in (self.tokens, self.requests):
            metric.remove_by_labels({label: value})
