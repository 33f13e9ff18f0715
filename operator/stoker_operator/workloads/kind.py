"""What a kind of object that runs pods has to offer: everything else in the operator is written against this."""

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
        group: its API group; empty: the core group.
        version: the version that is read and written.
        plural: its name in paths and in RBAC rules.
    """

    kind: str
    group: str
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        """Group and version, as manifests have them."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def path(self) -> str:
        """Where the API server has the group and version."""
        return f"apis/{self.group}/{self.version}" if self.group else f"api/{self.version}"


@dataclass(frozen=True)
class PodSet:
    """The pods of one workload, from which its objects are built.

    Attributes:
        owner: the endpoint, with the workload's name.
        replicas: how many replicas there should be.
        rollout: how they are replaced.
        template: what each pod is made from.
    """

    owner: Owner
    replicas: int
    rollout: RolloutSpec
    template: Manifest


class WorkloadKind(ABC):
    """A kind of object that runs the pods of a workload. A workload has one object of it, or several that differ in
    their component (`Child.component`).

    Attributes:
        resource: where the API server has it.
        verbs: what the operator does with it, as RBAC rules say it.
        dry_run: the API server's dry run of an object checks its pod templates.
    """

    resource: ClassVar[Resource]
    verbs: ClassVar[tuple[str, ...]] = ("get", "list", "watch", "create", "patch", "delete")
    dry_run: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """The kind, as manifests have it."""
        return self.resource.kind

    @abstractmethod
    def objects(self, pods: PodSet, live: Mapping[Child, Object]) -> tuple[Manifest, ...]:
        """The objects that should exist; the first one's first template is of the pods that answer requests.

        Args:
            pods: the workload's pods.
            live: the objects of this kind that the workload has.
        """

    @abstractmethod
    def templates(self, body: Object) -> tuple[Manifest, ...]:
        """The pod templates of one object, also of a part of one, which may have none."""

    @abstractmethod
    def with_templates(self, body: Manifest, templates: Sequence[Manifest]) -> Manifest:
        """The object, with other pod templates: as many as `templates` returns of it."""

    @abstractmethod
    def rollout(self, objects: Sequence[Object]) -> Rollout:
        """How far the workload has got, of which these are all objects."""

    @abstractmethod
    def has_served(self, live: Object) -> bool:
        """Whether the object's status shows that a pod of it serves, or has served."""

    @abstractmethod
    def pod_version(self, pod: Object, objects: Sequence[Object]) -> str:
        """Which templates a pod of the workload was made from: pods of the same version of the workload have the same,
        whichever of its objects made them."""

    @abstractmethod
    def selects(self, owner: Owner, live: Object) -> bool:
        """Whether the object `live` runs the pods of this workload and component, so that it can be adopted: an object
        whose selector cannot change may run others."""

    def request_pods(self, owner: Owner) -> dict[str, str]:
        """Labels of those pods of a workload that take requests."""
        return owner.selector()

    def metadata(self, owner: Owner) -> Manifest:
        """Metadata of an object of this kind."""
        metadata = owner.metadata()
        if owner.operator:
            metadata["annotations"] = {OPERATOR: owner.operator}
        return metadata
