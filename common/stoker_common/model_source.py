"""Sources of models: the field ``source`` of an InferenceEndpoint.

hf://ORG/NAME       a Hugging Face hub repository
pvc://CLAIM/PATH    a folder or file on a PersistentVolumeClaim, mounted under PVC_MOUNT
demo://NAME         a model contained in a Python package
file:///PATH        a folder or file on the machine that runs the engine
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from stoker_common.errors import ArgumentError

#: Mount path of a ``pvc://`` claim in the engine's pod.
PVC_MOUNT: Final = "/models"

#: Names of ``demo://`` models.
DEMO_MODELS: Final[tuple[str, ...]] = ("gemma-3-270m",)

#: Scheme → regular expression of a source; also used in the operator's schema.
SOURCE_PATTERNS: Final[dict[str, str]] = {
    "hf": r"hf://[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*",
    "pvc": r"pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[^/].*)?",
    "demo": r"demo://[a-z0-9][a-z0-9.-]*",
    "file": r"file:///.+",
}


@dataclass(frozen=True)
class ModelSource:
    """A parsed model source.

    Attributes:
        scheme: the URL scheme.
        name: hub id, claim name, demo name or absolute path.
        path: relative path of the folder or file inside the claim; empty for other schemes.
    """

    scheme: Literal["hf", "pvc", "demo", "file"]
    name: str
    path: str = ""

    @classmethod
    def parse(cls, source: str) -> ModelSource:
        """Parse ``scheme://…``.

        Raises:
            ArgumentError: `source` is invalid.
        """
        scheme, separator, location = source.partition("://")
        if not separator or scheme not in SOURCE_PATTERNS or not re.fullmatch(SOURCE_PATTERNS[scheme], source):
            raise ArgumentError(
                "source",
                f"{source!r} is none of hf://ORG/NAME, pvc://CLAIM/PATH, demo://NAME, file:///PATH",
            )
        if scheme == "demo" and location not in DEMO_MODELS:
            raise ArgumentError("source", f"there is no demo model {location!r}; available: {', '.join(DEMO_MODELS)}")
        if scheme == "pvc":
            claim, _, path = location.partition("/")
            if ".." in path.split("/"):
                raise ArgumentError("source", f"{source!r} leaves the claim; use a path without '..'")
            return cls("pvc", claim, path.rstrip("/"))
        return cls(scheme, location)  # type: ignore[arg-type]

    @property
    def model_argument(self) -> str:
        """The MODEL argument of ``stoker serve`` for this source."""
        if self.scheme == "demo":
            return f"demo://{self.name}"
        if self.scheme == "pvc":
            return f"{PVC_MOUNT}/{self.path}".rstrip("/")
        return self.name

    @property
    def served_name(self) -> str:
        """The default name of the model in requests."""
        if self.scheme == "pvc":
            return (self.path or self.name).rsplit("/", 1)[-1]
        if self.scheme == "file":
            return self.name.rstrip("/").rsplit("/", 1)[-1]
        return self.name
