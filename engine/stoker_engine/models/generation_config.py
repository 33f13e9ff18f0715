"""Default sampling parameters from a model's ``generation_config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from stoker_common.errors import ArgumentError, ModelError, RequestError
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.contract.json_file import read_json_object
from stoker_engine.core.sampling_params import SamplingParams

#: generation_config.json's name → name in `SamplingParams`; vLLM uses the same fields.
_NAMES: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_WHOLE: Final = {"top_k", "max_new_tokens"}


def sampling_defaults(argument: str, model: Path) -> dict[str, Any]:
    """Return the defaults that ``--generation-config`` selects, by their names in `SamplingParams`.

    Args:
        argument: ``auto``: the model's own file, if it exists; ``vllm``: no file; otherwise a folder with the file.
        model: folder of the model, or its GGUF file, which states no defaults.

    Raises:
        ArgumentError: the folder does not contain the file.
        ModelError: the file cannot be read, or a value is invalid.
    """
    if argument == "vllm" or (argument == "auto" and not (model / "generation_config.json").is_file()):
        return {}
    path = (model if argument == "auto" else Path(argument).expanduser()) / "generation_config.json"
    try:
        config = Fields(read_json_object(path), {}, file=str(path))
    except FileNotFoundError:
        raise ArgumentError(
            "--generation-config", f"{path} does not exist; use auto, vllm, or a folder that contains one"
        ) from None
    read = {name: config.integer if name in _WHOLE else config.number for name in _NAMES}
    defaults: dict[str, Any] = {
        ours: read[theirs](theirs, -1) for theirs, ours in _NAMES.items() if config.get(theirs) is not None
    }
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise ModelError(f"{path}: {error}; use --generation-config vllm to ignore the file") from error
    return defaults
