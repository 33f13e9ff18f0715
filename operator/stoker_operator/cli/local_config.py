"""Models on this machine: whether they exist, and their config.json."""

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


def model_exists(source: str, field: str) -> None:
    """Refuse a model folder or GGUF file that this machine does not have.

    Args:
        source: any valid model source; only those with ``file://`` are checked.
        field: the field or flag that the violation names.

    Raises:
        Refused: there is no such path, or it is a file of another kind.
    """
    parsed = ModelSource.parse(source)
    if parsed.scheme != "file":
        return
    path = Path(parsed.name)
    if not path.exists():
        raise Refused(Violation(field, f"there is no {path} on this machine", "use the path of a model"))
    if path.is_file() and path.suffix != ".gguf":
        raise Refused(Violation(field, f"{path} is not a GGUF file", "use the model's folder"))
