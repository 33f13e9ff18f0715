"""Sources of a request's parameters."""

from __future__ import annotations

import pytest

from stoker_common.errors import RequestError
from stoker_engine.core.sampling_defaults import sampling_params
from stoker_engine.core.sampling_params import SamplingParams

DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 100}


def test_request_overrides_the_models_defaults_and_those_the_neutral_values() -> None:
    params = sampling_params({"temperature": 0.0, "top_p": None, "seed": 4}, DEFAULTS)
    assert params == SamplingParams(temperature=0.0, top_p=0.95, seed=4, max_tokens=100)


def test_explicit_none_removes_the_limit() -> None:
    assert sampling_params({"max_tokens": None}, DEFAULTS).max_tokens is None


def test_parameters_default_to_neutral_values() -> None:
    assert sampling_params({}, {}) == SamplingParams()


def test_error_names_the_parameter() -> None:
    with pytest.raises(RequestError) as error:
        sampling_params({"top_p": 2.0}, DEFAULTS)
    assert error.value.param == "top_p"
