"""All the objects of an endpoint, in the order in which they are applied."""

from __future__ import annotations

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.manifests.deployment import deployment
from stoker_operator.manifests.owner import Manifest, Owner
from stoker_operator.manifests.service import service
from stoker_operator.manifests.service_account import service_account
from stoker_operator.plan.planner import Plan


def children(owner: Owner, spec: Spec, plan: Plan) -> tuple[Manifest, ...]:
    """The objects that should exist for `spec`; pods need the account, so it comes first.

    Raises:
        Refused: ``spec.engine.args`` cannot be honoured.
    """
    return (service_account(owner), service(owner, spec), deployment(owner, spec, plan))
