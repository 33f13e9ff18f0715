"""``--kv-cache-dtype`` through the engine: both backends agree, and sharing, forks, preemption and windows change
nothing.

The cache is guarded (`guarded_cache`), so that stray reads show.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from stoker_engine import LLM, SamplingParams
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.names import KV_CACHE_DTYPES
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.engine import Engine
from stoker_engine.exec import build_runner
from stoker_engine.sizing.kv_format import kv_format
from stoker_engine.sizing.memory import Numbers, stage_block_bytes
from stoker_engine.sizing.weight_sizes import ONE_DEVICE

from ...support.engine.tiny_configs import LLAMA_SIZES
from ...support.engine.tiny_models import save_model

DTYPES = [name for name in KV_CACHE_DTYPES if name not in ("auto", "fp8_e4m3")]
#: Tolerance: rounding to 8 bits turns differences of the last bit into differences of a code.
NEAR = 0.1
PROMPTS = [[5 + (7 * n * n + seed) % 400 for n in range(length)] for seed, length in enumerate((40, 33, 3, 90, 17))]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def tiny_deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latent attention."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        **{**LLAMA_SIZES, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )
    return save_model(tmp_path_factory.mktemp("tiny-deepseek"), DeepseekV3ForCausalLM(config).float().eval())


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Path:
    """Folder of the model that the test names."""
    folder: Path = request.getfixturevalue(request.param)
    return folder


def generate(model: Path, *batches: list[list[int]], **options: Any) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Return the tokens and their two best log-probabilities, of all prompts in order."""
    llm = LLM(str(model), max_model_len=256, **{"num_gpu_blocks_override": 256, **options})
    found = []
    for output in [output for batch in batches for output in llm.generate(batch, GREEDY, use_tqdm=False)]:
        [one] = output.outputs
        assert one.logprobs is not None
        found.append((one.token_ids, [{i: p.logprob for i, p in each.items()} for each in one.logprobs]))
    return found


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_gemma3", "tiny_deepseek"], indirect=True)
@pytest.mark.parametrize("kv_cache_dtype", DTYPES)
def test_both_backends_agree_and_the_batch_changes_no_bit(
    model: Path, kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together, one by one with the prefix cache, in small chunks, and with too few blocks for all."""
    options: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype}
    together = generate(model, PROMPTS, **options)
    alone = generate(model, *([prompt] for prompt in (*PROMPTS, *PROMPTS)), **options)
    tight = generate(model, PROMPTS, max_num_batched_tokens=24, num_gpu_blocks_override=36, **options)
    assert together == alone[: len(PROMPTS)] == alone[len(PROMPTS) :] == tight
    monkeypatch.setattr(build_runner, "attention_backend", lambda *_: SdpaBackend())
    for ours, theirs in zip(together, generate(model, PROMPTS, **options), strict=True):
        for token, other, best, likely in zip(ours[0], theirs[0], ours[1], theirs[1], strict=True):
            assert abs(max(best.values()) - max(likely.values())) < NEAR
            if token != other:
                first, second = sorted(likely.values())[-2:]
                assert second - first < NEAR
                break


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8_per_token_head"])
def test_forks_copy_scales_with_their_blocks(tiny_gemma3: Path, kv_cache_dtype: str) -> None:
    llm = LLM(str(tiny_gemma3), max_model_len=256, num_gpu_blocks_override=256, kv_cache_dtype=kv_cache_dtype)
    several = SamplingParams(n=4, seed=7, temperature=1.0, max_tokens=20, ignore_eos=True)
    [output] = llm.generate([PROMPTS[1]], several, use_tqdm=False)
    for index, child in enumerate(output.outputs):
        one = SamplingParams(seed=7 + index, temperature=1.0, max_tokens=20, ignore_eos=True)
        [alone] = llm.generate([PROMPTS[1]], one, use_tqdm=False)
        assert alone.outputs[0].token_ids == child.token_ids


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_gemma3", "tiny_deepseek"], indirect=True)
@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_planners_bytes_are_allocated(model: Path, kv_cache_dtype: str, dtype: str) -> None:
    llm = LLM(str(model), dtype=dtype, num_gpu_blocks_override=20, kv_cache_dtype=kv_cache_dtype)
    executor: Any = llm.engine.executor
    numbers = Numbers(4, kv_format(kv_cache_dtype, dtype), 16, 2048, 256)
    [block] = stage_block_bytes(executor.runner.model.config, numbers, ONE_DEVICE)
    assert executor.runner.pool._pool.shape == (20, block)
    assert len(llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 16


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", pytest.param("int8_per_token_head", marks=pytest.mark.slow)])
def test_ranks_keep_the_scales_of_their_heads(tiny_llama: Path, tmp_path: Path, kv_cache_dtype: str) -> None:
    """Also with one scale per head in the checkpoint. A head's keys do not depend on its rank, so no code differs."""
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    kinds = {"k_scale": torch.tensor([0.02, 0.09]), "v_scale": torch.tensor([0.01, 0.05])}
    scales = {
        f"model.layers.{layer}.self_attn.{name}": scale.clone() for layer in (0, 1) for name, scale in kinds.items()
    }
    save_file(load_file(folder / "model.safetensors") | scales, folder / "model.safetensors", {"format": "pt"})
    args = EngineArgs(
        str(folder), device="cpu", kv_cache_dtype=kv_cache_dtype, max_model_len=256, num_gpu_blocks_override=64
    )
    alone, ranks = Engine.from_args(args), Engine.from_args(replace(args, tensor_parallel_size=2))
    try:
        ours, alone = (prompt_logprobs(engine) for engine in (ranks, alone))
    finally:
        ranks.shutdown()
    assert len(ours) == len(PROMPTS[3]) - 1
    assert max(abs(one - other) for one, other in zip(ours, alone, strict=True)) < NEAR


def prompt_logprobs(engine: Engine) -> list[float]:
    """Return the log-probabilities of a prompt's own tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    engine.add(EngineRequest("one", PROMPTS[3], params, 1, 0, frozenset({1})))
    found = []
    while engine.has_work:
        for delta in engine.step().deltas:
            found += [each.logprobs[0] for each in delta.prompt_logprobs or []]
    return found
