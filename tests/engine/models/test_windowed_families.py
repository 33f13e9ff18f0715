"""Families with sliding windows in the engine, compared with transformers, with unaligned windows, tiles and blocks.

Windows are smaller than the kernel's tile (64 keys), equal to it, and no multiple of it or of the block; prompts end
around all these borders, and continue beyond the window. Cases are seeded. The cache is guarded (`guarded_cache`).
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker_engine import LLM, SamplingParams
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.exec import build_runner
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.sizing.cache_groups import blocks_per_sequence
from stoker_engine.sizing.kv_format import kv_format
from stoker_engine.sizing.memory import model_cache_groups

from ...support.engine.tiny_configs import SIZES
from ...support.engine.tiny_models import random_model

_SIZES: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "use_sliding_window": True,
    "max_window_layers": 2,
}
_LOCAL = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {},
    "mixtral": {},
    "qwen2": {},
    "qwen2_moe": {"moe_intermediate_size": 24},
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 24},
    "gemma2": {"query_pre_attn_scalar": 20},
    "gemma3_text": {"num_hidden_layers": 7},
    "phi3": {},
    "cohere2": {"num_hidden_layers": 5},
    "starcoder2": {},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "olmo3": _LOCAL,  # by transformers' own modules
    "exaone4": _LOCAL,
}
WINDOWS = [1, 7, 16, 20, 63, 64, 65, 100, 128, 150]
BLOCK_SIZES = [1, 4, 16, 32, 64]

CASES = [
    pytest.param(family, backend, number, id=f"{family}-{backend}-{number}", marks=[pytest.mark.slow] * (number > 0))
    for family in FAMILIES
    for backend in ("native", "sdpa")
    for number in range(4)
    if number > 0 or backend == "native" or family in ("gemma2", "gemma3_text", "cohere2", "olmo3")
]


@pytest.mark.parametrize(("family", "backend", "number"), CASES)
def test_prompts_past_the_window_equal_transformers(
    family: str, backend: str, number: int, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{family} {backend} {number}")
    window, block_size = rng.choice(WINDOWS), rng.choice(BLOCK_SIZES)
    theirs = random_model(family, {**_SIZES, "sliding_window": window, **FAMILIES[family]})
    theirs.save_pretrained(tmp_path)
    for file in tiny_llama.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    if backend == "sdpa":
        monkeypatch.setattr(build_runner, "attention_backend", lambda *args: SdpaBackend())

    near = [window, 64, 128, block_size, window + 64, window + block_size, 2 * window, window + 200]
    lengths = [max(1, rng.choice(near) + rng.randint(-2, 2)) for _ in range(4)] + [window + rng.randrange(100, 300)]
    prompts = [[rng.randrange(2, 128) for _ in range(length)] for length in lengths]
    step_tokens, longest = rng.choice([17, 64, 100, 512]), max(lengths) + 40
    args = {"block_size": block_size, "max_num_batched_tokens": step_tokens, "max_model_len": longest}
    kv = kv_format("auto", "float32")
    groups = model_cache_groups(find_checkpoint(EngineArgs(str(tmp_path))).config, block_size, kv)
    assert any(group.sliding_window == window for group in groups)
    # Room for the longest and about one more: sequences are preempted, and what windows leave is used again at once.
    needed = blocks_per_sequence(groups, longest, step_tokens, block_size)
    llm = LLM(str(tmp_path), num_gpu_blocks_override=1 + needed * 5 // 3, **args)

    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    again = [
        *prompts[-1],
        *outputs[-1].outputs[0].token_ids,
        5,
    ]  # a prefix hit past the window
    outputs += llm.generate([again], greedy, use_tqdm=False)
    for prompt, output in zip([*prompts, again], outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == 12
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.max(-1).values - chosen).max() <= 1e-3
