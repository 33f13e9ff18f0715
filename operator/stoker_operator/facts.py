"""What was seen of the cluster, frozen: the input of every decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Object = Mapping[str, Any]


class Key(NamedTuple):
    """Which endpoint."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Endpoint:
    """An InferenceEndpoint as the API server has it.

    Attributes:
        key: which one.
        uid: which object of that name.
        generation: counts the changes of its spec.
        deleting: it is on its way out.
        document: all of it.
        status: what was reported of it last.
    """

    key: Key
    uid: str
    generation: int
    deleting: bool
    document: Object
    status: Object


@dataclass(frozen=True)
class Rollout:
    """How far a Deployment has got.

    Attributes:
        current: its numbers are about its newest spec.
        desired: pods there should be.
        total: pods there are.
        updated: pods of the newest spec.
        ready: pods that are ready.
        available: pods that serve.
        failure: why pods cannot even be created, where the cluster says so.
    """

    current: bool
    desired: int
    total: int
    updated: int
    ready: int
    available: int
    failure: str = ""

    @property
    def complete(self) -> bool:
        """Whether every pod there should be serves from the newest spec, and no other is left."""
        counts = (self.total, self.updated, self.available)
        return self.current and all(count == self.desired for count in counts)


@dataclass(frozen=True)
class Pod:
    """One pod, as far as it explains why it does not serve.

    Attributes:
        name: its name.
        created: when, as the API server writes it.
        ready: it serves.
        unschedulable: why no node takes it.
        waiting: reason and message of a container that cannot start.
        exit_code: of the engine's last end; None if it never ended.
        exit_reason: Kubernetes' word for that end.
        last_words: the end of what the engine said before it.
    """

    name: str
    created: str
    ready: bool
    unschedulable: str = ""
    waiting: tuple[str, str] = ("", "")
    exit_code: int | None = None
    exit_reason: str = ""
    last_words: str = ""
