"""The engine on a GPU (`make test-gpu`): exact, batch-invariant, and without unintended host synchronization.

Single kernels are tested in `../kernels/triton/interpreted`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker_engine import LLM, SamplingParams
from stoker_engine.contract import names
from stoker_engine.parallel import transfer

from ...support.engine.tiny_models import prompts, save_model, tiny_family, tiny_mixture
from ..conftest import AssertGreedy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

FAMILIES = ["llama", "mistral", "gemma2", "gemma3", "cohere2", "bloom", "falcon rw", "granite", "olmo2", "gptj"]


def engine(model: Path, **fields: object) -> LLM:
    sizes = {"dtype": "float32", "num_gpu_blocks_override": 200, "max_model_len": 256, "max_num_batched_tokens": 48}
    return LLM(str(model), device="cuda", **{**sizes, **fields})


def check_greedy(model: Path, assert_greedy: AssertGreedy) -> None:
    """Assert that the engine's output equals transformers'."""
    prompt_list = prompts(4)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for prompt, output in zip(prompt_list, engine(model).generate(prompt_list, params, use_tqdm=False), strict=True):
        assert_greedy(model, prompt, list(output.outputs[0].token_ids))


@pytest.mark.parametrize("name", FAMILIES)
def test_family_equals_transformers(name: str, tmp_path: Path, assert_greedy: AssertGreedy) -> None:
    check_greedy(save_model(tmp_path, tiny_family(name)), assert_greedy)


@pytest.mark.parametrize("kv_cache_dtype", [name for name in names.KV_CACHE_DTYPES if name != "fp8"])
def test_triton_logprobs_equal_those_of_sdpa(kv_cache_dtype: str, tiny_llama: Path) -> None:
    """Both use the same bytes in the cache."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    found = [
        engine(tiny_llama, attention_backend=backend, kv_cache_dtype=kv_cache_dtype).generate(
            prompts(4), params, use_tqdm=False
        )
        for backend in ("triton", "sdpa")
    ]
    for ours, theirs in zip(*found, strict=True):
        assert ours.outputs[0].cumulative_logprob == pytest.approx(theirs.outputs[0].cumulative_logprob, abs=1e-3)


def test_seeded_request_draws_the_same_tokens_alone_and_in_a_batch(tiny_llama: Path) -> None:
    llm = engine(tiny_llama)
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=3, max_tokens=24, ignore_eos=True)
    together = llm.generate(prompts(6), params, use_tqdm=False)
    alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts(6)]
    assert [each.outputs[0].token_ids for each in together] == [each.outputs[0].token_ids for each in alone]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_invariant_logprobs_do_not_depend_on_batch_or_chunks(dtype: str, tiny_llama: Path) -> None:
    """Log-probabilities are bitwise equal alone, in a batch, and in other chunks."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
    found = []
    todo = [*prompts(6), [*range(3, 410)]]
    for size, batches in ((48, [todo]), (200, [[prompt] for prompt in todo])):
        llm = engine(tiny_llama, dtype=dtype, batch_invariant=True, max_num_batched_tokens=size, max_model_len=512)
        outputs = [each for batch in batches for each in llm.generate(batch, params, use_tqdm=False)]
        found.append([(each.outputs[0].token_ids, each.outputs[0].cumulative_logprob) for each in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_per_token_head"])
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_gemma3"])
def test_graphs_give_the_same_results_as_eager_steps(
    model: str, kv_cache_dtype: str, request: pytest.FixtureRequest
) -> None:
    """Steps of every size, sequences of a few tokens and of hundreds; padding rows change nothing."""
    todo = [*prompts(6), [7] * 300, [*range(3, 480)], *prompts(3)]
    params = [
        SamplingParams(temperature=0, max_tokens=3 + 2 * n, ignore_eos=True, logprobs=0) for n in range(len(todo))
    ]
    found = []
    for enforce_eager in (True, False):
        llm = engine(
            request.getfixturevalue(model),
            kv_cache_dtype=kv_cache_dtype,
            enforce_eager=enforce_eager,
            max_model_len=512,
        )
        runner = llm.engine.executor.runner  # type: ignore[union-attr]
        assert (runner.graphs is None) is enforce_eager
        found.append(llm.generate(todo, params, use_tqdm=False))
    for eager, replayed in zip(*found, strict=True):
        assert eager.outputs[0].token_ids == replayed.outputs[0].token_ids
        assert eager.outputs[0].cumulative_logprob == pytest.approx(replayed.outputs[0].cumulative_logprob, abs=1e-3)


def test_graphs_of_sampling_give_the_tokens_of_eager_steps(tiny_llama: Path) -> None:
    """Greedy and drawn tokens, in steps of 9 sequences to 1, some of them after a replay that had other rows."""
    options: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "top_k": 40}, {"top_p": 0.9}]
    params = [
        SamplingParams(seed=n, max_tokens=3 + 2 * n, ignore_eos=True, **options[n % len(options)]) for n in range(9)
    ]
    found = []
    for enforce_eager in (True, False):
        llm = engine(tiny_llama, batch_invariant=True, enforce_eager=enforce_eager)
        for draws in (params, [replace(each, temperature=0) for each in params]):
            found.append([each.outputs[0].token_ids for each in llm.generate(prompts(9), draws, use_tqdm=False)])
        graphs = llm.engine.executor.runner.finish.draws.graphs  # type: ignore[union-attr]
        assert bool(graphs and graphs.captured) is not enforce_eager
    assert found[:2] == found[2:]


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_mixtures_equal_transformers(name: str, tmp_path: Path, assert_greedy: AssertGreedy) -> None:
    check_greedy(save_model(tmp_path, tiny_mixture(name)), assert_greedy)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_graphs_of_models_quantized_on_load_equal_eager_steps(quantization: str, tiny_llama: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    found = [
        engine(tiny_llama, quantization=quantization, enforce_eager=eager).generate(prompts(4), params, use_tqdm=False)
        for eager in (True, False)
    ]
    for eager, replayed in zip(*found, strict=True):
        assert eager.outputs[0].token_ids == replayed.outputs[0].token_ids


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_on_two_gpus_give_the_tokens_of_one(sizes: dict[str, int], enforce_eager: bool, tiny_llama: Path) -> None:
    """Greedy, drawn and late ones; sums are split in float32."""
    params = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0, repetition_penalty=1.2, max_tokens=16, ignore_eos=True),
    ] * 2
    found = []
    for options in ({}, {**sizes, "enforce_eager": enforce_eager}):
        with engine(tiny_llama, **options) as llm:
            found.append([each.outputs[0].token_ids for each in llm.generate(prompts(6), params, use_tqdm=False)])
    assert found[0] == found[1]


@pytest.fixture
def forbid_synchronization(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make all synchronizations of the host with the GPU fail, except when a step's results are read."""
    values = transfer.HostCopy.values

    def read(copy: transfer.HostCopy) -> object:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return values(copy)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(transfer.HostCopy, "values", read)
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_steps_synchronize_only_at_permitted_places(tiny_llama: Path, forbid_synchronization: None) -> None:
    llm = engine(tiny_llama)
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    drawn = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=1, max_tokens=16, ignore_eos=True)
    special: list[dict[str, Any]] = [
        {"min_tokens": 9, "ignore_eos": False},
        {"bad_words": ["a", "the"]},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
        {"logit_bias": {7: 3.0}},
        {"allowed_token_ids": [5, 6, 7]},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"n": 3},
    ]
    torch.cuda.set_sync_debug_mode("error")
    for params in (greedy, drawn, *(replace(drawn, **more) for more in special)):
        llm.generate(prompts(4), params, use_tqdm=False)
