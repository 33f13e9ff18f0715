"""``--batch-invariant``: log-probabilities are bitwise equal, however the work is split."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MixtralConfig, MixtralForCausalLM

from stoker_common.errors import ArgumentError
from stoker_engine import LLM, SamplingParams
from stoker_engine.attention.select import attention_backend

from ...support.engine.served import served
from ...support.engine.tiny_configs import LLAMA_SIZES
from ...support.engine.tiny_models import save_model

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
Result = tuple[list[int], list[dict[int, float]]]


def generate(model: Path, dtype: str, *batches: list[list[int]], **args: Any) -> list[Result]:
    """Return tokens and log-probabilities of all prompts in order; each batch runs after the previous one."""
    args = {"num_gpu_blocks_override": 256, "max_model_len": 512, **args}
    llm = LLM(str(model), dtype=dtype, batch_invariant=True, **args)
    outputs = [output for batch in batches for output in llm.generate(batch, GREEDY, use_tqdm=False)]
    results = []
    for output in outputs:
        one = output.outputs[0]
        assert one.logprobs is not None
        results.append((one.token_ids, [{i: p.logprob for i, p in each.items()} for each in one.logprobs]))
    return results


@pytest.fixture(scope="module")
def tiny_mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mixture of experts: the rows that an expert multiplies together depend on the batch."""
    torch.manual_seed(0)
    config = MixtralConfig(**LLAMA_SIZES, num_local_experts=4, num_experts_per_tok=2)
    return save_model(tmp_path_factory.mktemp("tiny-mixtral"), MixtralForCausalLM(config).float().eval())


@pytest.fixture(scope="module")
def tiny_deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latent attention, and shared experts."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        **{**LLAMA_SIZES, "num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=24,
    )
    return save_model(tmp_path_factory.mktemp("tiny-deepseek"), DeepseekV3ForCausalLM(config).float().eval())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("folder", "few_blocks"), [("tiny_llama", 20), ("tiny_gemma3", 64), ("tiny_mixtral", 20), ("tiny_deepseek", 20)]
)
def test_logprobs_are_bitwise_equal_however_the_work_is_split(
    folder: str, few_blocks: int, dtype: str, request: pytest.FixtureRequest
) -> None:
    model: Path = request.getfixturevalue(folder)
    rng = random.Random(0)
    shared = [rng.randrange(2, 512) for _ in range(70)]
    prompts = [shared + [rng.randrange(2, 512) for _ in range(n)] for n in (1, 37, 90)]
    prompts += [[rng.randrange(2, 512) for _ in range(n)] for n in (1, 16, 33, 128)]
    alone = generate(model, dtype, *([prompt] for prompt in prompts), enable_prefix_caching=False)
    ways = {
        "together": generate(model, dtype, prompts, enable_prefix_caching=False),
        "in chunks": generate(model, dtype, prompts, enable_prefix_caching=False, max_num_batched_tokens=24),
        "prefix hits": generate(model, dtype, [shared], prompts)[1:],
        "preempted": generate(model, dtype, prompts, num_gpu_blocks_override=few_blocks, max_model_len=200),
    }
    for name, results in ways.items():
        for prompt, one, other in zip(prompts, alone, results, strict=True):
            assert one == other, f"{name}, prompt of {len(prompt)}"


def test_batch_invariance_is_refused_for_unsupported_dtypes() -> None:
    with pytest.raises(ArgumentError, match=r"--batch-invariant.*float16"):
        attention_backend(torch.device("cpu"), served(torch.float16), batch_invariant=True)
