"""Commands with adapters' names, on a fake engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker_common.errors import AdapterError
from stoker_engine import async_llm
from stoker_engine.cli import bench, chat, run_batch
from stoker_engine.cli.bench.serving import BenchServeArgs, models_of

from ...support.waiting import until
from ..server.conftest import FakeEngine, Serving, serving_fake


def _ready(served: Serving) -> None:
    until(lambda: served.service.is_loaded and served.service.has_adapters)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def batch(tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run ``stoker run-batch`` on requests for some models; return its exit code and the responses."""
    monkeypatch.setattr(async_llm, "AsyncLLM", lambda *args, **kwargs: engine)

    def run(models: list[str], *words: str) -> tuple[int, dict[str, Any]]:
        source, sink = tmp_path / "in", tmp_path / "out"
        lines = [
            {"custom_id": model, "method": "POST", "url": "/v1/completions", "body": {"model": model, "prompt": "a"}}
            for model in models
        ]
        source.write_text("\n".join(map(json.dumps, lines)))
        code = run_batch.main(["-i", str(source), "-o", str(sink), "--model=tiny", "--disable-tqdm", *words])
        answers = map(json.loads, sink.read_text().split("\n")[:-1])
        return code, {answer["custom_id"]: answer["response"] for answer in answers}

    return run


def test_batches_select_adapters_by_model(batch: Any, engine: FakeEngine) -> None:
    code, answers = batch(["tiny", "ada", "bob", "cat"], "--enable-lora", "--lora-modules", "ada=/a", "bob=/b")
    assert code == 1, "no model is named cat"
    assert {name: answer["status_code"] for name, answer in answers.items()} == {
        "tiny": 200,
        "ada": 200,
        "bob": 200,
        "cat": 404,
    }
    assert {answer["body"].get("model") for answer in answers.values()} == {"tiny", "ada", "bob", None}
    numbers = {source.name: number for number, source in engine.adapters.items()}
    assert sorted(engine.adapters_asked) == sorted([-1, numbers["ada"], numbers["bob"]])


def test_batches_with_invalid_adapters_are_refused(
    batch: Any, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.bad_adapters["b"] = AdapterError("another base model")
    assert batch(["tiny"], "--enable-lora", "--lora-modules", "ada=/a", "bob=/b") == (2, {})
    assert "--lora-modules: bob: another base model" in capsys.readouterr().err
    assert batch(["tiny"], "--lora-modules", "ada=/a") == (2, {})
    assert "--lora-modules: requires --enable-lora" in capsys.readouterr().err


def test_bench_spreads_requests_over_adapters(tiny_llama: Path, engine: FakeEngine) -> None:
    with serving_fake(engine, enable_lora=True, lora_modules=("a=/a", "b=/b", "c=/c")) as served:
        _ready(served)
        words = ["--num-prompts=40", "--random-input-len=4", "--random-output-len=4", "--disable-tqdm"]
        words += [f"--base-url={served.url}", f"--tokenizer={tiny_llama}", "--num-warmups=0", "--no-ignore-eos"]
        assert bench.main(["serve", *words, "--lora-modules", "a", "b"]) == 0
        numbers = {source.name: number for number, source in engine.adapters.items()}
        assert set(engine.adapters_asked) == {numbers["a"], numbers["b"]}
        assert len(engine.adapters_asked) == 40


def test_the_distribution_over_adapters_is_seeded() -> None:
    args = BenchServeArgs(lora_modules=("a", "b", "c"))
    first = models_of(args, "m", 300, seed=0)
    assert first == models_of(args, "m", 300, seed=0)
    assert first != models_of(args, "m", 300, seed=1)
    assert all(60 < first.count(name) < 140 for name in "abc")
    assert models_of(BenchServeArgs(), "m", 3, seed=0) == ["m"] * 3


def test_chat_selects_an_adapter_by_model_name(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    with serving_fake(engine, enable_lora=True, lora_modules=("ada=/a",)) as served:
        _ready(served)
        assert chat.main([f"--url={served.url}/v1", "--model-name=ada", "--quick=hi"]) == 0
        assert capsys.readouterr().out == "hello world\n"
        assert engine.adapters_asked == [0]
