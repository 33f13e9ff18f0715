"""The offline API: parameters do what they say, and bad ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker_engine import LLM, SamplingParams
from stoker_engine.contract.errors import ArgumentError, ModelError, RequestError
from stoker_engine.core.request import FinishReason


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> LLM:
    return LLM(str(tiny_llama), max_model_len=128, num_gpu_blocks_override=256)


def _one(llm: LLM, prompt: Any = "the quick brown", **params: Any) -> Any:
    params = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, **params}
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs[0]


def test_max_tokens(llm: LLM) -> None:
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
    import json
    import shutil

    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    third = _one(LLM(str(tiny_llama)), [5, 6, 7]).token_ids[2]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [third]}))
    llm = LLM(str(folder))
    assert _one(llm, [5, 6, 7], ignore_eos=False).finish_reason is FinishReason.STOP
    assert len(_one(llm, [5, 6, 7], ignore_eos=True).token_ids) == 24


def test_a_seed_repeats_alone_and_in_a_batch_and_chunked(llm: LLM, tiny_llama: Path) -> None:
    seeded = {"temperature": 1.0, "top_p": 0.95, "top_k": 40, "seed": 7}
    alone = _one(llm, [9, 8, 7], **seeded).token_ids
    params = SamplingParams(max_tokens=24, ignore_eos=True, **seeded)
    others = SamplingParams(max_tokens=24, ignore_eos=True)
    batch = [[3] * 30, [9, 8, 7], [4] * 9]
    chunked = LLM(str(tiny_llama), max_num_batched_tokens=8)
    for engine in (llm, chunked):
        outputs = engine.generate(batch, [others, params, others], use_tqdm=False)
        assert outputs[1].outputs[0].token_ids == alone
    assert _one(llm, [9, 8, 7], **{**seeded, "seed": 8}).token_ids != alone


def test_a_restart_repeats_unseeded_requests(tiny_llama: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    runs = [
        [output.outputs[0].token_ids for output in engine.generate([[9, 8, 7]] * 2, params, use_tqdm=False)]
        for engine in (LLM(str(tiny_llama), num_gpu_blocks_override=64, seed=seed) for seed in (3, 3, 4))
    ]
    assert runs[0] == runs[1] != runs[2]


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
        {"tensor_parallel_size": 2},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "int3"},
        {"device": "cuda"},
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
def test_a_model_that_is_not_there(model: str) -> None:
    with pytest.raises(ModelError):
        LLM(model)


def test_a_sequence_that_cannot_fit_the_cache_is_refused_with_what_fits(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match="--max-model-len to 64"):
        LLM(str(tiny_llama), num_gpu_blocks_override=4, max_model_len=65)
    assert LLM(str(tiny_llama), num_gpu_blocks_override=4).engine.max_model_len == 64


def test_the_cache_is_sized_by_the_contracts_sums(tiny_llama: Path) -> None:
    llm = LLM(str(tiny_llama), kv_cache_memory_bytes=1 << 20)
    # 2 layers, keys and values, blocks of 16 tokens, 2 heads of 16, 4 bytes
    assert llm.engine.runner.num_blocks == (1 << 20) // (2 * 2 * 16 * 2 * 16 * 4)
