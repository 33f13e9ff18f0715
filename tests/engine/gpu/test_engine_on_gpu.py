"""The engine on a GPU, where there is one (`make test-gpu`): exact, the same in every batch, and never waiting.

Kernels by themselves: `../kernels/triton/interpreted`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stoker_engine import LLM, SamplingParams
from stoker_engine.contract import names
from stoker_engine.exec import runner
from stoker_engine.parallel import transfer
from stoker_engine.sampling import logits, logprobs, sampler

from ..conftest import AssertGreedy
from ..models.test_families import prompts, tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

FAMILIES = ["llama", "mistral", "gemma2", "gemma3", "cohere2", "bloom", "falcon rw", "granite", "olmo2", "gptj"]


def engine(model: Path, **fields: object) -> LLM:
    sizes = {"dtype": "float32", "num_gpu_blocks_override": 200, "max_model_len": 256, "max_num_batched_tokens": 48}
    return LLM(str(model), device="cuda", **{**sizes, **fields})


@pytest.mark.parametrize("name", FAMILIES)
def test_family_equals_transformers(name: str, tmp_path: Path, assert_greedy: AssertGreedy) -> None:
    tiny(name).save_pretrained(tmp_path)
    todo = prompts(4)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for prompt, output in zip(todo, engine(tmp_path).generate(todo, params, use_tqdm=False), strict=True):
        assert_greedy(tmp_path, prompt, list(output.outputs[0].token_ids))


@pytest.mark.parametrize("kv_cache_dtype", [name for name in names.KV_CACHE_DTYPES if name != "fp8"])
def test_as_by_torchs_own_attention(kv_cache_dtype: str, tiny_llama: Path) -> None:
    """With the same bytes in the cache."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    found = [
        engine(tiny_llama, attention_backend=backend, kv_cache_dtype=kv_cache_dtype).generate(
            prompts(4), params, use_tqdm=False
        )
        for backend in ("triton", "sdpa")
    ]
    for ours, theirs in zip(*found, strict=True):
        assert ours.outputs[0].cumulative_logprob == pytest.approx(theirs.outputs[0].cumulative_logprob, abs=1e-3)


def test_a_seeded_request_draws_the_same_alone_and_in_a_batch(tiny_llama: Path) -> None:
    llm = engine(tiny_llama)
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=3, max_tokens=24, ignore_eos=True)
    together = llm.generate(prompts(6), params, use_tqdm=False)
    alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts(6)]
    assert [each.outputs[0].token_ids for each in together] == [each.outputs[0].token_ids for each in alone]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_invariance(dtype: str, tiny_llama: Path) -> None:
    """Log-probabilities are the same bits alone, in a batch, in other chunks."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
    found = []
    for size, batches in ((48, [prompts(6)]), (200, [[prompt] for prompt in prompts(6)])):
        llm = engine(tiny_llama, dtype=dtype, batch_invariant=True, max_num_batched_tokens=size)
        outputs = [each for batch in batches for each in llm.generate(batch, params, use_tqdm=False)]
        found.append([(each.outputs[0].token_ids, each.outputs[0].cumulative_logprob) for each in outputs])
    assert found[0] == found[1]


@pytest.fixture
def only_named_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever has the host wait for the GPU is an error, but for the one place that may."""

    def to_host(tensor: torch.Tensor) -> object:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return transfer.to_host(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    for module in (runner, sampler, logits, logprobs):
        monkeypatch.setattr(module, "to_host", to_host)
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_steps_wait_in_the_named_place_only(tiny_llama: Path, only_named_waits: None) -> None:
    llm = engine(tiny_llama)
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    drawn = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=1, max_tokens=16, ignore_eos=True)
    torch.cuda.set_sync_debug_mode("error")
    for params in (greedy, drawn):
        llm.generate(prompts(4), params, use_tqdm=False)
