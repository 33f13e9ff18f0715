"""Reads a model's config.json from a folder on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker_common.errors import ModelError
from stoker_common.model_source import ModelSource
from stoker_engine.architectures.model_config import read_config
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.violation import Refused, Violation


def local_config(spec: Spec) -> dict[str, Any] | None:
    """Return the config.json of a ``file://`` source, or None for other sources, or if there is no such folder.

    Raises:
        Refused: the folder has no valid config.json.
    """
    source = ModelSource.parse(spec.model.source)
    folder = Path(source.name)
    if source.scheme != "file" or not folder.is_dir():
        return None
    try:
        return read_config(folder)
    except ModelError as error:
        raise Refused(Violation("spec.model.source", str(error))) from None
