"""Sources of a request's parameters."""

from __future__ import annotations

import pytest

from stoker_common.errors import RequestError
from stoker_engine.core.sampling_defaults import sampling_params
from stoker_engine.core.sampling_params import SamplingParams

DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 100}


def test_what_is_said_counts_then_the_models_makers_then_the_neutral_value() -> None:
    params = sampling_params({"temperature": 0.0, "top_p": None, "seed": 4}, DEFAULTS)
    assert params == SamplingParams(temperature=0.0, top_p=0.95, seed=4, max_tokens=100)


def test_no_limit_may_be_said() -> None:
    assert sampling_params({"max_tokens": None}, DEFAULTS).max_tokens is None


def test_nothing_said_and_nothing_recommended() -> None:
    assert sampling_params({}, {}) == SamplingParams()


def test_a_wrong_value_is_named() -> None:
    with pytest.raises(RequestError) as error:
        sampling_params({"top_p": 2.0}, DEFAULTS)
    assert error.value.param == "top_p"
