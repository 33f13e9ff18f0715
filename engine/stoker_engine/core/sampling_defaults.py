"""Merges the parameters of a request with the model's recommended ones into `SamplingParams`.

A value in the request has precedence. If it is absent or None (`max_tokens`: only if absent), the model's
generation_config.json applies, and after that the default of `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker_engine.core.sampling_params import SamplingParams


def sampling_params(requested: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Build the sampling parameters of a request.

    Args:
        requested: the request's parameters, by the names of `SamplingParams`; None counts as absent, except for
            `max_tokens`, where an explicit None stands for the rest of the context.
        defaults: `EngineInfo.sampling_defaults`.

    Raises:
        RequestError: a value is out of range; `param` names it.
    """
    stated = {name: value for name, value in requested.items() if value is not None or name == "max_tokens"}
    return SamplingParams(**{**defaults, **stated})
