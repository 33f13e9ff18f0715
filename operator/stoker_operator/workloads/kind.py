"""The interface of a kind of object that runs pods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from stoker_operator.api.v1alpha1.rollout import Rollout as RolloutSpec
from stoker_operator.objects.facts import Child, Object, Rollout
from stoker_operator.objects.owner import OPERATOR, Manifest, Owner


class Resource(NamedTuple):
    """A kind of object in the Kubernetes API.

    Attributes:
        kind: its name in manifests.
        group: its API group; empty for the core group.
        version: the version that is read and written.
        plural: its name in paths and in RBAC rules.
    """

    kind: str
    group: str
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        """The apiVersion in manifests."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def path(self) -> str:
        """The API server's path of the group and version."""
        return f"apis/{self.group}/{self.version}" if self.group else f"api/{self.version}"


@dataclass(frozen=True)
class PodSet:
    """The pods of one workload, from which its objects are built.

    Attributes:
        owner: the endpoint, with the workload's name.
        replicas: number of desired replicas.
        rollout: the rollout strategy.
    """

    owner: Owner
    replicas: int
    rollout: RolloutSpec
    template: Manifest


class WorkloadKind(ABC):
    """A kind of object that runs the pods of a workload.

    A workload has one object of the kind, or several with different components (`Child.component`).

    Attributes:
        resource: the kind's API resource.
        verbs: the RBAC verbs that the operator needs.
        dry_run: whether the API server's dry run of an object validates its pod templates.
    """

    resource: ClassVar[Resource]
    verbs: ClassVar[tuple[str, ...]] = ("get", "list", "watch", "create", "patch", "delete")
    dry_run: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """The kind's name in manifests."""
        return self.resource.kind

    @abstractmethod
    def objects(self, pods: PodSet, live: Mapping[Child, Object]) -> tuple[Manifest, ...]:
        """Return the objects that should exist.

        The first template of the first object creates the pods that answer requests.

        Args:
            pods: the workload's pods.
            live: the workload's existing objects of this kind.
        """

    @abstractmethod
    def templates(self, body: Object) -> tuple[Manifest, ...]:
        """Return the pod templates of an object, or of a part of an object, which may have none."""

    @abstractmethod
    def with_templates(self, body: Manifest, templates: Sequence[Manifest]) -> Manifest:
        """Return the object with other pod templates, as many as `templates` returns for it."""

    @abstractmethod
    def rollout(self, objects: Sequence[Object]) -> Rollout:
        """Return the progress of a workload; `objects` are all its objects of this kind."""

    @abstractmethod
    def has_served(self, live: Object) -> bool:
        """Return whether the object's status shows that one of its pods is or was ready."""

    @abstractmethod
    def pod_version(self, pod: Object, objects: Sequence[Object]) -> str:
        """Return the version of the templates that a pod was created from.

        Pods of the same version of the workload have the same value, whichever of its objects created them.
        """

    @abstractmethod
    def selects(self, owner: Owner, live: Object) -> bool:
        """Return whether the object `live` selects the pods of this workload and component, so that it can be adopted.

        Selectors are immutable, so an object with another selector cannot be adopted.
        """

    def request_pods(self, owner: Owner) -> dict[str, str]:
        """Return labels that select those pods of a workload that answer requests."""
        return owner.selector()

    def metadata(self, owner: Owner) -> Manifest:
        """Return the metadata of an object of this kind."""
        metadata = owner.metadata()
        if owner.operator:
            metadata["annotations"] = {OPERATOR: owner.operator}
        return metadata
