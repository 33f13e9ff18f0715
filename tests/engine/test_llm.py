"""The offline API: effects of parameters, and refused ones."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker_common.errors import AdapterError, ArgumentError, ModelError, RequestError
from stoker_engine import LLM, BeamSearchParams, LoRARequest, SamplingParams
from stoker_engine.core.adapter import AdapterSource, LoadedAdapter
from stoker_engine.core.logit_rules import LogitRules
from stoker_engine.core.request import FinishReason
from stoker_engine.exec.build_runner import build_runner
from stoker_engine.exec.runner import Runner

from ..support.engine.row_tables import RowTables


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> LLM:
    return LLM(str(tiny_llama), max_model_len=128, num_gpu_blocks_override=256)


def _one(llm: LLM, prompt: Any = "the quick brown", **params: Any) -> Any:
    params = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, **params}
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs[0]


def test_a_scored_prompt_may_fill_context_and_cache(tiny_llama: Path) -> None:
    """Its log-probabilities equal those with more room."""
    prompt = [5 + i * 7 % 200 for i in range(64)]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    [expected] = LLM(str(tiny_llama), num_gpu_blocks_override=64).generate([prompt], params, use_tqdm=False)
    for budget in (8, 48, 64):
        llm = LLM(str(tiny_llama), num_gpu_blocks_override=5, max_num_batched_tokens=budget)
        assert llm.engine.info.max_model_len == 64
        for _ in range(2):
            [output] = llm.generate([prompt], replace(params, only_scores=True), use_tqdm=False)
            assert output.outputs[0].finish_reason == "length"
            assert output.prompt_logprobs is not None and expected.prompt_logprobs is not None
            for found, expected_position in zip(output.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
                assert found is not None and expected_position is not None
                known = {token: each.logprob for token, each in expected_position.items()}
                assert {token: each.logprob for token, each in found.items()} == pytest.approx(known, abs=1e-4)
        with pytest.raises(RequestError, match="maximum context length"):
            llm.generate([prompt], params, use_tqdm=False)


def test_max_tokens_limits_the_output(llm: LLM) -> None:
    output = _one(llm, max_tokens=5)
    assert len(output.token_ids) == 5
    assert output.finish_reason is FinishReason.LENGTH


def test_without_max_tokens_the_context_is_filled(llm: LLM) -> None:
    assert len(_one(llm, [5, 6, 7], max_tokens=None).token_ids) == 125


def test_a_stop_string_ends_the_text_and_is_no_part_of_it(llm: LLM) -> None:
    whole = _one(llm).text
    stop = whole[len(whole) // 2 :][:3]
    output = _one(llm, stop=(stop,))
    assert output.text == whole[: whole.index(stop)]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)


def test_a_stop_token_ends_the_output(llm: LLM) -> None:
    whole = _one(llm)
    token = whole.token_ids[4]
    output = _one(llm, stop_token_ids=(token,))
    assert output.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, token)


def test_the_end_token_stops_unless_ignored(tiny_llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    third = _one(LLM(str(tiny_llama)), [5, 6, 7]).token_ids[2]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [third]}))
    llm = LLM(str(folder))
    assert _one(llm, [5, 6, 7], ignore_eos=False).finish_reason is FinishReason.STOP
    assert len(_one(llm, [5, 6, 7], ignore_eos=True).token_ids) == 24


def test_penalties_count_right_in_forks_and_after_preemptions(tiny_llama: Path) -> None:
    prompts = [[9, 8, 7, 8] * 8, [5, 6] * 16, [20, 21, 22] * 10]
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": -0.4, "max_tokens": 40}
    params = SamplingParams(**penalties, n=3, seed=3, ignore_eos=True)  # type: ignore[arg-type]
    found = []
    for blocks in (200, 14):
        llm = LLM(str(tiny_llama), max_model_len=128, num_gpu_blocks_override=blocks)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([[o.token_ids for o in output.outputs] for output in outputs])
        assert bool(llm.engine.scheduler.num_preemptions) == (blocks == 14)
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0][0]}) == 3


def test_logit_rules_are_built_once_per_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    of = LogitRules.of
    monkeypatch.setattr(LogitRules, "of", lambda request: made.append(request.id) or of(request))
    many = list(range(300))
    rules = {"allowed_token_ids": many, "stop_token_ids": many[:200], "logit_bias": dict.fromkeys(many, 1.0)}
    output = _one(llm, **rules, min_tokens=20, bad_words=["a", "b c"], frequency_penalty=0.5, n=2)
    assert len(output.token_ids) >= 20
    assert len(made) == 1


def test_a_seed_repeats_its_output_alone_batched_and_chunked(llm: LLM, tiny_llama: Path) -> None:
    seeded = {"temperature": 1.0, "top_p": 0.95, "top_k": 40, "seed": 7}
    alone = _one(llm, [9, 8, 7], **seeded).token_ids
    params = SamplingParams(max_tokens=24, ignore_eos=True, **seeded)
    other_params = SamplingParams(max_tokens=24, ignore_eos=True)
    batch = [[3] * 30, [9, 8, 7], [4] * 9]
    chunked = LLM(str(tiny_llama), max_num_batched_tokens=8)
    for engine in (llm, chunked):
        outputs = engine.generate(batch, [other_params, params, other_params], use_tqdm=False)
        assert outputs[1].outputs[0].token_ids == alone
    assert _one(llm, [9, 8, 7], **{**seeded, "seed": 8}).token_ids != alone


def test_the_engines_seed_repeats_unseeded_requests(tiny_llama: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    runs = [
        [output.outputs[0].token_ids for output in engine.generate([[9, 8, 7]] * 2, params, use_tqdm=False)]
        for engine in (LLM(str(tiny_llama), num_gpu_blocks_override=64, seed=seed) for seed in (3, 3, 4))
    ]
    assert runs[0] == runs[1] != runs[2]


def test_min_tokens_prevents_earlier_stop_tokens(llm: LLM) -> None:
    whole = _one(llm).token_ids
    output = _one(llm, stop_token_ids=(whole[3],), min_tokens=10)
    assert len(output.token_ids) >= 10
    assert whole[3] not in output.token_ids[:9]


def test_a_stop_string_may_be_part_of_the_text(llm: LLM) -> None:
    whole = _one(llm).text
    stop = whole[len(whole) // 2 :][:3]
    output = _one(llm, stop=(stop,), include_stop_str_in_output=True)
    assert output.text == whole[: whole.index(stop) + 3]


def test_bad_words_are_never_generated(llm: LLM) -> None:
    words = [llm.tokenizer.decode([token]) for token in _one(llm).token_ids]
    word = next(word for word in words if word.strip().isalnum())
    assert word not in _one(llm, bad_words=(word,)).text


def test_only_allowed_tokens_are_generated(llm: LLM) -> None:
    assert set(_one(llm, allowed_token_ids=(40, 41, 42), temperature=1.0).token_ids) <= {40, 41, 42}


def test_a_large_logit_bias_decides(llm: LLM) -> None:
    assert _one(llm, logit_bias={77: 100.0}).token_ids == [77] * 24


def test_a_repetition_penalty_ends_repetition(llm: LLM) -> None:
    output = _one(llm, repetition_penalty=1e6, max_tokens=60)
    assert len(set(output.token_ids)) == 60


def test_n_outputs_share_the_prompt(llm: LLM) -> None:
    [output] = llm.generate([[5] * 40], SamplingParams(n=3, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert output.finished and len({tuple(completion.token_ids) for completion in output.outputs}) == 3


def test_one_of_n_may_stop_before_the_others(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=1, max_tokens=24, ignore_eos=True)
    whole = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs
    stop = whole[2].text[5:8]
    stopped = llm.generate([[5, 6, 7]], dataclasses.replace(params, stop=(stop,)), use_tqdm=False)[0].outputs
    for before, after in zip(whole, stopped, strict=True):
        assert after.text == before.text.partition(stop)[0]
    assert stopped[2].stop_reason == stop


def test_logprobs_are_those_of_the_tokens_and_sum_up(llm: LLM) -> None:
    output = _one(llm, logprobs=0, temperature=1.0)
    assert [list(position) for position in output.logprobs] == [[token] for token in output.token_ids]
    assert output.cumulative_logprob == pytest.approx(
        sum(position[token].logprob for position, token in zip(output.logprobs, output.token_ids, strict=True))
    )


def test_more_logprobs_than_permitted_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="--max-logprobs"):
        _one(llm, logprobs=21)


def test_a_prompt_is_truncated_to_its_end(llm: LLM) -> None:
    [output] = llm.generate([list(range(2, 200))], SamplingParams(max_tokens=4, truncate_prompt_tokens=10))
    assert output.prompt_token_ids == list(range(190, 200))


def test_beam_search_returns_its_beams_best_first(llm: LLM) -> None:
    [output] = llm.beam_search(["the quick"], BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True))
    scores = [beam.cum_logprob for beam in output.sequences]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    assert all(beam.text.startswith("the quick") and len(beam.tokens) == 2 + 6 for beam in output.sequences)


def test_beams_report_their_stop_reason(llm: LLM) -> None:
    """As in vLLM, it is the token that ended the beam."""
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    [output] = llm.beam_search([[5, 6]], params)
    assert {beam.stop_reason for beam in output.sequences} == {None}
    first = output.sequences[0].tokens[2]
    stopping = replace(params, stop_token_ids=[first], early_stopping=True, length_penalty=-9)  # prefers short beams
    [output] = llm.beam_search([[5, 6]], stopping)
    stopped = [beam for beam in output.sequences if beam.finish_reason is FinishReason.STOP]
    assert stopped
    for beam in output.sequences:
        assert beam.stop_reason == (beam.tokens[-1] if beam in stopped else None)


def test_beams_that_cannot_fit_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError) as refused:
        llm.beam_search([[5] * 20], BeamSearchParams(beam_width=100, max_tokens=100))
    assert refused.value.param == "n"
    assert not llm.engine.has_work


def test_prompts_are_accepted_in_vllms_forms(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [{"prompt": "the quick"}, {"prompt_token_ids": llm.tokenizer.encode("the quick")}, "the quick"]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_the_models_recommendations_are_the_defaults(tiny_llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "top_k": 5, "max_new_tokens": 9}))
    options = {"num_gpu_blocks_override": 32}
    defaults = LLM(str(folder), **options).get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.max_tokens) == (0.3, 5, 9)
    assert LLM(str(folder), generation_config="vllm", **options).get_default_sampling_params() == SamplingParams()
    elsewhere = LLM(str(tiny_llama), generation_config=str(folder), **options)
    assert elsewhere.get_default_sampling_params() == defaults
    with pytest.raises(ArgumentError, match="--generation-config"):
        LLM(str(folder), generation_config=str(tmp_path), **options)


def test_priority_is_served_first(tiny_llama: Path) -> None:
    llm = LLM(str(tiny_llama), num_gpu_blocks_override=64, max_num_seqs=1, scheduling_policy="priority")
    first: list[str] = []
    step = llm.engine.step

    def watched() -> Any:
        outputs = step()
        first.extend(delta.request_id for delta in outputs.deltas if delta.request_id not in first)
        return outputs

    llm.engine.step = watched  # type: ignore[method-assign]
    llm.generate([[5], [6], [7]], SamplingParams(max_tokens=2), use_tqdm=False, priority=[2, 0, 1])
    assert first == ["1", "2", "0"]


def test_disabled_chunked_prefill_requires_steps_as_long_as_the_context(tiny_llama: Path) -> None:
    with pytest.raises(ArgumentError, match="--max-num-batched-tokens to 512"):
        LLM(str(tiny_llama), num_gpu_blocks_override=64, enable_chunked_prefill=False, max_num_batched_tokens=100)


def test_unseeded_requests_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate([[9, 8, 7]] * 4, params, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) > 1


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ("",)}, "stop"),
        ({"seed": 2**64}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"logit_bias": {1: 101}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"bad_words": (" ",)}, "bad_words"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"logprobs": -2}, "logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_bad_parameters_are_refused_by_name(params: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**params)
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field"),
    [
        ([], 1, "prompt"),
        ([5] * 128, 1, "prompt"),
        ([5] * 100, 29, "max_tokens"),
        ([5, 512], 1, "prompt"),
        ([-1], 1, "prompt"),
    ],
)
def test_bad_prompts_are_refused(llm: LLM, prompt: list[int], max_tokens: int, field: str) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate([prompt], SamplingParams(max_tokens=max_tokens))
    assert refused.value.param == field
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 3},
        {"kv_cache_dtype": "int3"},
        pytest.param(
            {"device": "cuda"}, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available")
        ),
        {"dtype": "int8"},
        {"gpu_memory_utilization": 1.5},
        {"block_size": 3},
        {"max_num_seqs": 0},
        {"revision": "main"},
    ],
)
def test_arguments_that_cannot_be_met_are_refused(tiny_llama: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as refused:
        LLM(str(tiny_llama), **options)
    assert refused.value.argument == "--" + next(iter(options)).replace("_", "-")


@pytest.mark.parametrize("model", ["/nowhere", "demo://nothing", "s3://bucket/model", "not-a-model"])
def test_missing_models_are_refused(model: str) -> None:
    with pytest.raises(ModelError):
        LLM(model)


def test_a_context_beyond_the_cache_is_refused_with_the_length_that_fits(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match="--max-model-len to 64"):
        LLM(str(tiny_llama), num_gpu_blocks_override=5, max_model_len=65)
    assert LLM(str(tiny_llama), num_gpu_blocks_override=5).engine.info.max_model_len == 64


def test_the_cache_is_sized_by_the_contracts_sums(tiny_llama: Path) -> None:
    llm = LLM(str(tiny_llama), kv_cache_memory_bytes=1 << 20)
    # 2 layers, keys and values, blocks of 16 tokens, 2 heads of 16, 4 bytes
    assert llm.engine.info.num_blocks == (1 << 20) // (2 * 2 * 16 * 2 * 16 * 4)


def test_logits_of_many_streams_are_searched_in_parts(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In some steps some streams need more: then all logits are computed at once."""
    prompts = [[30 + (i * 17 + at * 5) % 60 for at in range(3 + i)] for i in range(11)]
    params = [SamplingParams(temperature=0, max_tokens=4 + i, ignore_eos=True) for i in range(10)]
    params.append(SamplingParams(temperature=0, max_tokens=3, logprobs=1))
    expected = LLM(str(tiny_llama)).generate(prompts, params, use_tqdm=False)
    llm = LLM(str(tiny_llama))
    runner = llm.engine.executor.runner  # type: ignore[attr-defined]
    runner.finish = replace(runner.finish, draws=replace(runner.finish.draws, logits_at_once=3))
    sizes = list[int]()
    logits = runner.model.logits
    monkeypatch.setattr(runner.model, "logits", lambda rows: sizes.append(len(rows)) or logits(rows))
    got = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs for output in got] == [output.outputs for output in expected]
    assert 11 in sizes and 3 in sizes and sizes.count(1) > 1


class _SlotAdapters(RowTables):
    """Adapters of `RowTables`, loaded from folders with a file ``number``."""

    def load(self, source: AdapterSource) -> LoadedAdapter:
        if not (file := Path(source.path, "number")).exists():
            raise AdapterError(f"{source.path} has no adapter")
        self.loaded[source.number] = int(file.read_text())
        return LoadedAdapter(file.read_text(), 8, 100, 0.0)

    def drop(self, number: int) -> None:
        del self.loaded[number]

    def activate(self, slot: int, number: int) -> None:
        assert self.numbers is not None
        self.numbers[slot] = self.loaded[number]


@pytest.fixture
def lora_llm(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """An LLM whose adapters are vectors, and folders of three of them."""
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "number").write_text(str(number))
    extend = _SlotAdapters(3, numbers=torch.full((2,), -1))
    extend.loaded = {}  # type: ignore[attr-defined]

    def build(*args: Any, **options: Any) -> Runner:
        runner = build_runner(*args, **options, adapt=lambda build: dataclasses.replace(build, extend=extend))
        runner.adapters = extend
        return runner

    monkeypatch.setattr("stoker_engine.engine.build_runner", build)
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "num_gpu_blocks_override": 64}
    return LLM(str(tiny_llama), enable_lora=True, max_loras=1, **options)


def test_lora_requests_select_adapters(lora_llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    requests = [LoRARequest(f"adapter {number}", number + 1, str(tmp_path / str(number))) for number in range(3)]

    def generate(prompts: Any, **options: Any) -> list[list[int]]:
        return [list(o.outputs[0].token_ids) for o in lora_llm.generate(prompts, params, use_tqdm=False, **options)]

    [base] = generate([[5, 6, 7]])
    each = [generate([[5, 6, 7]], lora_request=request)[0] for request in requests]
    assert len({tuple(tokens) for tokens in (base, *each)}) == 4
    assert generate([[5, 6, 7]] * 4, lora_request=[requests[2], None, *requests[:2]]) == [each[2], base, *each[:2]]
    assert generate([[5, 6, 7]] * 2, lora_request=requests[1]) == [each[1]] * 2
    found = lora_llm.beam_search([[5, 6, 7]], BeamSearchParams(1, 8, ignore_eos=True), lora_request=requests[0])
    assert found[0].sequences[0].tokens[3:] == each[0]


def test_conflicting_lora_requests_are_refused(lora_llm: LLM, tmp_path: Path, llm: LLM) -> None:
    request = LoRARequest("a", 1, str(tmp_path / "0"))
    lora_llm.generate([[5]], SamplingParams(max_tokens=1), use_tqdm=False, lora_request=request)
    for other in (LoRARequest("b", 1, str(tmp_path / "0")), LoRARequest("a", 1, str(tmp_path / "1"))):
        with pytest.raises(AdapterError, match=r"lora_int_id 1 already refers to a in .*; choose another id"):
            lora_llm.generate([[5]], use_tqdm=False, lora_request=other)
    with pytest.raises(AdapterError, match="has no adapter"):
        lora_llm.generate([[5]], use_tqdm=False, lora_request=LoRARequest("c", 3, str(tmp_path / "7")))
    with pytest.raises(RequestError, match="2 prompts but 1 lora_requests"):
        lora_llm.generate([[5], [6]], use_tqdm=False, lora_request=[request])
    with pytest.raises(AdapterError, match="enable_lora=True"):
        llm.generate([[5]], use_tqdm=False, lora_request=request)
    for wrong in ("a", ["a"], 1):
        with pytest.raises(RequestError, match="must be a LoRARequest, or one or None for each prompt"):
            lora_llm.generate([[5]], use_tqdm=False, lora_request=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (("", 1, "x"), "lora_name"),
        ((None, 1, "x"), "lora_name"),
        (("a", 0, "x"), "lora_int_id"),
        (("a", "1", "x"), "lora_int_id"),
        (("a", True, "x"), "lora_int_id"),
        (("a", 1, ""), "lora_path"),
        (("a", 1, None), "lora_path"),
    ],
)
def test_lora_requests_with_wrong_fields_are_refused(fields: tuple[Any, Any, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} must "):
        LoRARequest(*fields)
