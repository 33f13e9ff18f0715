"""A server's report about its engines is read back; other text is ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker_engine.contract.engine_state import EngineState

STATES = [
    EngineState(0, True),
    EngineState(3, False, 8, (0, 7), "loading again after: rank 7 of 8 was killed", 100, 1600),
]


@pytest.mark.parametrize("state", STATES)
def test_engine_state_survives_json(state: EngineState) -> None:
    assert EngineState.from_dict(json.loads(json.dumps(state.to_dict()))) == state
    assert EngineState.from_dict(state.to_dict() | {"of_a_later_version": 1}) == state


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        "x",
        {},
        {"number": 0},
        {"serves": True},
        {"number": "0", "serves": True},
        {"number": True, "serves": True},
        {"number": -1, "serves": True},
        {"number": 0.0, "serves": True},
        {"number": 0, "serves": 1},
        {"number": 0, "serves": True, "ranks": None},
        {"number": 0, "serves": True, "missing_ranks": 3},
        {"number": 0, "serves": True, "missing_ranks": "12"},
        {"number": 0, "serves": True, "missing_ranks": ["1"]},
        {"number": 0, "serves": True, "message": None},
        {"number": 0, "serves": True, "kv_blocks": "9"},
        {"number": 0, "serves": True, "kv_tokens": {}},
    ],
    ids=str,
)
def test_malformed_state_is_ignored(wrong: Any) -> None:
    assert EngineState.from_dict(wrong) is None
