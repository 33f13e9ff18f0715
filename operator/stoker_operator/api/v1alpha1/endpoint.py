"""The InferenceEndpoint resource."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final, Literal

from pydantic import ConfigDict

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import Part
from stoker_operator.api.v1alpha1.spec import Spec

GROUP: Final = "stoker.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "InferenceEndpoint"
PLURAL: Final = "inferenceendpoints"

# A Service's name must be a DNS-1035 label of at most 63 characters; 11 are reserved for suffixes of derived names.
NAME_PATTERN: Final = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAME_LENGTH: Final = 52


class Metadata(Part):
    """The fields of the standard object metadata that are needed here."""

    model_config = ConfigDict(extra="ignore")

    name: str
    namespace: str | None = None


class InferenceEndpoint(Part):
    """A model served with an OpenAI-compatible API: the model, its hardware and the number of replicas."""

    api_version: Literal["stoker.dev/v1alpha1"]
    kind: Literal["InferenceEndpoint"]
    metadata: Metadata
    spec: Spec
    """Desired state: the model, the hardware and the serving options."""
    status: dict[str, Any] | None = None
    """State that the operator reports; ignored in manifests."""

    RULES: ClassVar = (
        Rule(
            field="metadata.name",
            holds=lambda it: (
                len(it.metadata.name) <= NAME_LENGTH and re.fullmatch(NAME_PATTERN, it.metadata.name) is not None
            ),
            cel=f"self.metadata.name.size() <= {NAME_LENGTH} && self.metadata.name.matches('{NAME_PATTERN}')",
            message="this name is not valid for an InferenceEndpoint",
            remedy=f"use at most {NAME_LENGTH} lower-case letters, digits and '-', a letter first and no '-' last",
        ),
    )
