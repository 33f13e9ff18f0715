"""The runner's state of sequences: rows start, fork, and are reused."""

from __future__ import annotations

from array import array

import numpy as np

from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.core.step import Fork, NewSequence, Step
from stoker_engine.exec.input_batch import InputBatch
from stoker_engine.sizing.cache_groups import NULL_BLOCK, CacheGroup

GROUPS = (CacheGroup(None, (0,), 1), CacheGroup(8, (1,), 1), CacheGroup(None, (2,), 0, "state", 9, 3))


def engine_request(name: str, prompt: list[int], **params: object) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(temperature=0, **params), 8)  # type: ignore[arg-type]


def step(**changes: object) -> Step:
    nothing = array("i")
    return Step(0, nothing, nothing, nothing, nothing, 0, 0, **changes)  # type: ignore[arg-type]


def new(row: int, request: EngineRequest, length: int) -> NewSequence:
    return NewSequence(row, request, 0, [], [[*range(1, 1 + length)], [*range(21, 21 + length)], [41, 42, 43]])


def test_a_reused_row_keeps_nothing_of_its_previous_sequence() -> None:
    rows = InputBatch(4, 64, 4, GROUPS)
    rows.apply(step(new=[new(2, engine_request("a", list(range(30)), repetition_penalty=1.5), 8)]))
    rows.apply(step(tables=array("i", [0, 2, 8, 15, 1, 2, 0, NULL_BLOCK])))
    assert rows.tables[0, 2, :10].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 15, 0]
    assert rows.tables[1, 2, :2].tolist() == [0, 22]
    rows.apply(step(new=[new(2, engine_request("b", [5, 6]), 1)]))
    assert rows.tables[:, 2, :5].tolist() == [[1, 0, 0, 0, 0], [21, 0, 0, 0, 0], [41, 42, 43, 0, 0]]
    assert rows.token_ids[2, :2].tolist() == [5, 6]
    assert rows.choice(2, 2, 1, []) is None and rows.states[2].counts is None


def test_a_fork_counts_its_own_tokens_though_its_parent_is_ahead() -> None:
    rows = InputBatch(4, 64, 4, GROUPS)
    rows.apply(step(new=[new(0, engine_request("a", [7, 7, 8], frequency_penalty=1.0, n=2), 1)]))
    rows.append(0, 3, [9])
    rows.append_one([0], [4], [10])
    rows.apply(step(forks=[Fork(1, 0, 1, 3, [1, 1, 3])], written=[(1, 3, [11])]))
    parent, child = rows.choice(0, 5, 1, []), rows.choice(1, 4, 1, [])
    assert parent is not None and child is not None and parent.counts is not None and child.counts is not None
    assert list(parent.counts.tokens) == [9, 10] and list(child.counts.tokens) == [11]
    assert np.array_equal(child.known, [7, 7, 8, 11]) and child.seed == 1
    assert rows.tables[:, 1, :3].tolist() == [[1, 0, 0], [21, 0, 0], [41, 42, 43]]


def test_a_reused_request_id_has_its_own_rules() -> None:
    rows = InputBatch(4, 64, 4, GROUPS)
    rows.apply(step(new=[new(0, engine_request("a", [1, 2], logit_bias={5: 100.0}), 1)]))
    rows.apply(step(new=[new(1, engine_request("a", [1, 2]), 1)]))  # the first has ended; its row is not reused yet
    assert rows.choice(0, 2, 1, []) is not None
    assert rows.choice(1, 2, 1, []) is None
    rows.apply(step(new=[new(2, engine_request("a", [1, 2], logit_bias={6: 1.0}), 1)]))
    again = rows.choice(2, 2, 1, [])
    assert again is not None and again.rules is not None and list(again.rules.bias_tokens) == [6]


def test_sequences_of_one_request_share_its_rules() -> None:
    rows = InputBatch(4, 64, 4, GROUPS)
    request = engine_request("a", [1, 2], logit_bias={5: 1.0})
    rows.apply(step(new=[new(0, request, 1), new(1, request, 1)]))
    assert rows.states[0].rules is rows.states[1].rules is not None
