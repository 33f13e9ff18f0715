"""Datasets of benchmarks: requested lengths, reproducible, from common file formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker_common.errors import ArgumentError
from stoker_engine.cli.bench.datasets import DatasetArgs, load_dataset
from stoker_engine.cli.bench.report import percentile, summary
from stoker_engine.cli.bench.serving import BenchServeArgs


class Words:
    """One token per word."""

    vocab_size = 1000

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]


def test_random_prompts_have_the_requested_lengths() -> None:
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


def test_prefix_repetition_shares_prefixes() -> None:
    args = DatasetArgs("prefix_repetition", num_prompts=40, prefix_repetition_num_prefixes=4)
    samples = load_dataset(args, Words(), 600)
    assert len({tuple(s.prompt[:256]) for s in samples}) == 4
    assert len({tuple(s.prompt) for s in samples}) == 40


def test_sharegpt_conversations_become_prompts(tmp_path: Path) -> None:
    messages = [{"from": "human", "value": "a bb ccc dddd"}, {"from": "gpt", "value": "one two three four five"}]
    short = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"conversations": messages}, {"conversations": short}, {"conversations": []}]))
    samples = load_dataset(DatasetArgs("sharegpt", str(path), num_prompts=3), Words(), 600)
    assert [(s.prompt, s.output_len) for s in samples] == [([1, 2, 3, 4], 5)] * 3
    path.write_text("{")
    with pytest.raises(ArgumentError, match="--dataset-path"):
        load_dataset(DatasetArgs("sharegpt", str(path)), Words(), 600)


def test_custom_prompts_have_their_output_lengths(tmp_path: Path) -> None:
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


TURNS = [{"from": "human", "value": "a bb ccc dddd"}, {"from": "gpt", "value": "one two three four five"}]
ENTRIES: dict[str, dict[str, Any]] = {
    "sharegpt": {"conversations": TURNS},
    "custom": {"prompt": "a bb ccc dddd", "output_tokens": 5},
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize(("name", "layout"), [("custom", "lines"), ("sharegpt", "lines"), ("sharegpt", "list")])
def test_a_file_is_read_in_every_layout(name: str, layout: str, newline: str, encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    for count in (1, 3):
        entries = [ENTRIES[name]] * count
        text = json.dumps(entries) if layout == "list" else newline.join(map(json.dumps, entries)) + newline
        path.write_bytes(text.encode(encoding))
        samples = load_dataset(DatasetArgs(name, str(path), num_prompts=count), Words(), 600)
        assert [(s.prompt, s.output_len) for s in samples] == [([1, 2, 3, 4], 5)] * count


#: One entry per published format.
OTHERS: dict[str, Any] = {
    "MT-bench": {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
    "Vicuna": {"question_id": 1, "text": "a", "category": "generic"},
    "LLaMA-Factory": {"instruction": "a", "input": "", "output": "b"},
    "C4": {"text": "a", "timestamp": "2019-04-25T12:57:54Z", "url": "http://c.example"},
    "OpenAI": {"messages": [{"role": "user", "content": "a"}]},
    "turns of OpenAI": {"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "text": "a",
    "number": 5,
    "list": ["a", "b"],
    "no turns": {"conversations": {"a": "b"}},
    "numbers for text": {"conversations": [{"value": 1}, {"value": 2}], "prompt": 5, "output_tokens": 4},
}


@pytest.mark.parametrize("layout", ["lines", "list"])
@pytest.mark.parametrize("name", ["custom", "sharegpt"])
@pytest.mark.parametrize("other", OTHERS)
def test_other_formats_are_refused_in_a_sentence(other: str, name: str, layout: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    good = {**ENTRIES["custom"], **ENTRIES["sharegpt"]}
    entries = [good, OTHERS[other]]
    path.write_text(json.dumps(entries) if layout == "list" else "\n".join(map(json.dumps, entries)))
    with pytest.raises(ArgumentError) as refused:
        load_dataset(DatasetArgs(name, str(path)), Words(), 600)
    message = str(refused.value)
    field = "prompt" if name == "custom" else "conversations"
    assert field in message and "Formats:" in message
    assert "Error" not in message and "attribute" not in message
    if layout == "lines" or name == "sharegpt":
        assert f"{'line' if layout == 'lines' else 'entry'} 2" in message


@pytest.mark.parametrize("count", [None, 0, -3, "many", 1e400, [5]])
def test_invalid_output_tokens_are_refused(count: Any, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text(json.dumps({"prompt": "a", "output_tokens": count}))
    with pytest.raises(ArgumentError, match=r'line 1: "output_tokens" must be a whole number'):
        load_dataset(DatasetArgs("custom", str(path)), Words(), 600)


@pytest.mark.parametrize("name", ["custom", "sharegpt"])
@pytest.mark.parametrize("content", ["{", "[" * 100_000, '{"a": 1} x', "é".encode("latin-1"), b"\xff\xfe{\x00"])
def test_malformed_json_is_refused_in_a_sentence(name: str, content: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    words = r"is not UTF-8 \(byte 0 is 0x..\); convert it" if isinstance(content, bytes) else r"line 1 is not JSON"
    with pytest.raises(ArgumentError, match=words):
        load_dataset(DatasetArgs(name, str(path)), Words(), 600)


@pytest.mark.parametrize("percents", ["", "50;90", "101", "-1", "half"])
def test_invalid_percentiles_are_refused_before_the_benchmark(percents: str) -> None:
    with pytest.raises(ArgumentError, match="--metric-percentiles"):
        BenchServeArgs(metric_percentiles=percents)


def test_percentiles_are_numpys() -> None:
    import numpy as np

    values = [0.5, 0.1, 0.9, 0.3, 0.2]
    for percent in (0, 10, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))
    figures = summary("ttft", values, [99])
    assert figures["median_ttft_ms"] == pytest.approx(300)
    assert figures["std_ttft_ms"] == pytest.approx(1000 * float(np.std(values)))
