"""The served model."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import Field

from stoker_common.model_source import DEMO_MODELS, SOURCE_PATTERNS
from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import EachOnce, Part
from stoker_operator.api.v1alpha1.references import ConfigMapKeyRef, SecretKeyRef

SOURCE_PATTERN = "^(" + "|".join(SOURCE_PATTERNS.values()) + ")$"
LEAVES_CLAIM = r"^pvc://.*/\.\.(/|$)"
Revision = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")]
ServedName = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$")]
DEMO_SOURCES = [f"demo://{name}" for name in DEMO_MODELS]


class ChatTemplate(Part):
    """The chat template: its text, or a reference to it."""

    value: Annotated[str, Field(min_length=1, max_length=32000)] | None = None
    """The Jinja template itself."""
    config_map_key_ref: ConfigMapKeyRef | None = None
    """A key of a ConfigMap in the endpoint's namespace, with the template. It is read when a pod starts."""

    RULES: ClassVar = (
        Rule(
            field="",
            holds=lambda it: (it.value is None) != (it.config_map_key_ref is None),
            cel="has(self.value) != has(self.configMapKeyRef)",
            message="a chat template has exactly one source",
            remedy="set either value or configMapKeyRef",
        ),
    )


class Model(Part):
    """The served model and its names."""

    source: Annotated[str, Field(min_length=1, max_length=512)]
    """Source of the model. hf://ORG/NAME: a Hugging Face hub repository. pvc://CLAIM/PATH: a folder or file on a
    PersistentVolumeClaim in the endpoint's namespace, mounted read-only. demo://NAME: a model in Stoker's image.
    file:///PATH: a folder or file on the machine that runs the engine; in a cluster, in its container."""
    revision: Revision | None = None
    """Branch, tag or commit of a hub repository. Absent: the repository's default branch."""
    served_names: Annotated[list[ServedName], Field(min_length=1, max_length=16), *EachOnce] | None = None
    """Model names that the API accepts; responses and metrics report the first. Absent: the name in the source."""
    token_secret_ref: SecretKeyRef | None = None
    """A key of a Secret, with the token that a gated or private hub repository requires."""
    trust_remote_code: bool | None = None
    """Whether Python code that comes with the model may run in the pod. Absent: it may not."""
    chat_template: ChatTemplate | None = None
    """Template that converts a chat to a prompt; exactly one field must be set. Absent: the model's own template;
    without one, chat requests fail."""

    RULES: ClassVar = (
        Rule(
            field="source",
            holds=lambda it: re.fullmatch(SOURCE_PATTERN, it.source) is not None,
            cel=f"self.source.matches(r'{SOURCE_PATTERN}')",
            message="the value is not a model source",
            remedy="use hf://ORG/NAME, pvc://CLAIM/PATH, demo://NAME or file:///PATH",
        ),
        Rule(
            field="source",
            holds=lambda it: not it.source.startswith("demo://") or it.source in DEMO_SOURCES,
            cel=f"!self.source.startsWith('demo://') || self.source in {DEMO_SOURCES}",
            message="there is no such demo model",
            remedy=f"use {' or '.join(DEMO_SOURCES)}",
        ),
        Rule(
            field="source",
            holds=lambda it: re.search(LEAVES_CLAIM, it.source) is None,
            cel=f"!self.source.matches(r'{LEAVES_CLAIM}')",
            message="the path leaves the claim",
            remedy="use a path without '..'",
        ),
        Rule(
            field="revision",
            holds=lambda it: it.revision is None or it.source.startswith("hf://"),
            cel="!has(self.revision) || self.source.startsWith('hf://')",
            message="only hf:// sources have revisions",
            remedy="remove revision, or name a hub repository",
        ),
        Rule(
            field="tokenSecretRef",
            holds=lambda it: it.token_secret_ref is None or it.source.startswith("hf://"),
            cel="!has(self.tokenSecretRef) || self.source.startsWith('hf://')",
            message="only hf:// sources take a token",
            remedy="remove tokenSecretRef, or name a hub repository",
        ),
    )
