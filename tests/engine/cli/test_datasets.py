"""Data sets of benchmarks: as long as asked for, the same each time, from files people have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker_engine.cli.bench.datasets import DatasetArgs, load_dataset
from stoker_engine.cli.bench.report import percentile, summary
from stoker_engine.contract.errors import ArgumentError


class Words:
    """A token a word."""

    vocab_size = 1000

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]


def test_random() -> None:
    args = DatasetArgs(num_prompts=50, random_input_len=20, random_output_len=8, random_prefix_len=5)
    samples = load_dataset(args, Words(), 600)
    assert samples == load_dataset(args, Words(), 600)
    assert {(len(s.prompt), s.output_len) for s in samples} == {(25, 8)}
    assert len({tuple(s.prompt[:5]) for s in samples}) == 1
    assert len({tuple(s.prompt) for s in samples}) == 50
    assert max(max(s.prompt) for s in samples) < 600
    spread = DatasetArgs(num_prompts=200, random_input_len=100, random_range_ratio=0.5)
    lengths = [len(s.prompt) for s in load_dataset(spread, Words(), 600)]
    assert 50 <= min(lengths) < 60
    assert 140 < max(lengths) <= 150


def test_prefix_repetition() -> None:
    args = DatasetArgs("prefix_repetition", num_prompts=40, prefix_repetition_num_prefixes=4)
    samples = load_dataset(args, Words(), 600)
    assert len({tuple(s.prompt[:256]) for s in samples}) == 4
    assert len({tuple(s.prompt) for s in samples}) == 40


def test_sharegpt(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "a bb ccc dddd"}, {"from": "gpt", "value": "one two three four five"}]
    short = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": short}, {"conversations": []}]))
    samples = load_dataset(DatasetArgs("sharegpt", str(path), num_prompts=3), Words(), 600)
    assert [(s.prompt, s.output_len) for s in samples] == [([1, 2, 3, 4], 5)] * 3
    path.write_text("{")
    with pytest.raises(ArgumentError, match="--dataset-path"):
        load_dataset(DatasetArgs("sharegpt", str(path)), Words(), 600)


def test_custom(tmp_path: Path) -> None:
    path = tmp_path / "custom.jsonl"
    path.write_text('{"prompt": "a b", "output_tokens": 3}\n\n{"prompt": "ccc", "output_tokens": 4}\n')
    samples = load_dataset(DatasetArgs("custom", str(path), num_prompts=2, disable_shuffle=True), Words(), 600)
    assert [(s.prompt, s.output_len) for s in samples] == [([1, 1], 3), ([3], 4)]
    path.write_bytes('{"prompt": "a\u2028\u2029\x85b", "output_tokens": 3}\r\n'.encode() * 2)
    samples = load_dataset(DatasetArgs("custom", str(path), num_prompts=2), Words(), 600)
    assert [s.output_len for s in samples] == [3, 3]
    path.write_text('{"prompt": "a b"}\n')
    with pytest.raises(ArgumentError, match="line 1"):
        load_dataset(DatasetArgs("custom", str(path)), Words(), 600)


def test_percentiles_are_numpys() -> None:
    import numpy as np

    values = [0.5, 0.1, 0.9, 0.3, 0.2]
    for percent in (0, 10, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))
    figures = summary("ttft", values, [99])
    assert figures["median_ttft_ms"] == pytest.approx(300)
    assert figures["std_ttft_ms"] == pytest.approx(1000 * float(np.std(values)))
