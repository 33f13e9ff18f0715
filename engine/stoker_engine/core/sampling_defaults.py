"""The one place where a request's parameters and the model's recommended ones become `SamplingParams`.

What a request says counts; for what it leaves out (absent or None), the model's makers' recommendation
(generation_config.json); where they say nothing, the neutral default of `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker_engine.core.sampling_params import SamplingParams


def sampling_params(requested: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters of a request.

    Args:
        requested: what the request says, by the names of `SamplingParams`; None is as good as absent, save for
            `max_tokens`, where a None that is given means the rest of the context.
        defaults: `EngineInfo.sampling_defaults`.

    Raises:
        RequestError: a value is out of range; `param` names it.
    """
    stated = {name: value for name, value in requested.items() if value is not None or name == "max_tokens"}
    return SamplingParams(**{**defaults, **stated})
