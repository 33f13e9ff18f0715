"""A pipeline's stages give the results of one process: cases that only stages could break."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.engine import Engine
from stoker_engine.exec.executor import Executor
from stoker_engine.models.decoder import Decoder
from stoker_engine.sizing.pipeline_stages import pipeline_stages
from stoker_engine.sizing.weight_sizes import Sharding, stage_weight_bytes

from ...support.engine.thread_ranks import ThreadExecutor, thread_engine
from ...support.engine.tiny_models import save_model
from ..exec.test_rank_executor import TIGHT, _check_alike, _requests, _run

ROOMY: dict[str, Any] = {"max_model_len": 192, "num_gpu_blocks_override": 400, "max_num_batched_tokens": 48}


@pytest.mark.parametrize(
    ("model", "tensor", "options"),
    [
        ("tiny_llama", 1, TIGHT),
        ("tiny_llama", 1, {**ROOMY, "async_scheduling": True}),
        ("tiny_llama", 2, {**TIGHT, "async_scheduling": True}),
        ("tiny_gemma3", 1, {**TIGHT, "num_gpu_blocks_override": 60}),
    ],
)
def test_two_stages_give_the_outputs_of_one_process(
    model: str, tensor: int, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(model)
    args = EngineArgs(str(folder), dtype="float32", device="cpu", **options)
    requests = _requests(random.Random(tensor).randrange(1000))
    expected, _ = _run(Engine.from_args(args), requests)
    with thread_engine(replace(args, tensor_parallel_size=tensor, pipeline_parallel_size=2)) as engine:
        found, preempted = _run(engine, requests)
        assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_usable
    assert _check_alike(found, expected) > 0.9 * len(found)
    assert (preempted > 0) == (options["num_gpu_blocks_override"] < 400)


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stages_in_processes_give_the_outputs_of_one_process(tensor: int, tiny_llama: Path) -> None:
    args = EngineArgs(str(tiny_llama), dtype="float32", device="cpu", **TIGHT)
    requests = _requests(5)
    expected, _ = _run(Engine.from_args(args), requests)
    engine = Engine.from_args(replace(args, tensor_parallel_size=tensor, pipeline_parallel_size=2))
    try:
        found, _ = _run(engine, requests)
    finally:
        engine.shutdown()
    assert _check_alike(found, expected) > 0.9 * len(found)


def _family(name: str) -> PreTrainedModel:
    """Return a model with parts that stages could get wrong: both ends, and layers that differ."""
    torch.manual_seed(0)
    if name == "gpt2":  # tied, with learned positions
        return GPT2LMHeadModel(GPT2Config(vocab_size=503, n_embd=48, n_layer=3, n_head=4, n_positions=256))
    if name == "opt":  # projections before and after the layers
        config = OPTConfig(
            vocab_size=503,
            hidden_size=48,
            word_embed_proj_dim=32,
            ffn_dim=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=256,
            do_layer_norm_before=False,
        )
        return OPTForCausalLM(config)
    common: dict[str, Any] = {"vocab_size": 503, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4}
    if name == "deepseek":  # latent attention; experts in all layers but the first
        mla = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
        experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
        return DeepseekV2ForCausalLM(
            DeepseekV2Config(
                num_hidden_layers=3, first_k_dense_replace=1, n_group=1, topk_group=1, **mla, **experts, **common
            )
        )
    tied = name == "tied llama"
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=5, num_key_value_heads=2, tie_word_embeddings=tied, **common))


@pytest.mark.parametrize("name", ["gpt2", "opt", "deepseek", "tied llama", "untied llama"])
def test_three_stages_of_each_family_give_the_outputs_of_one_process(name: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, _family(name).float().eval())
    args = EngineArgs(str(model), dtype="float32", device="cpu", **TIGHT)
    requests = _requests(7)[:10]
    expected, _ = _run(Engine.from_args(args), requests)
    with thread_engine(replace(args, pipeline_parallel_size=3)) as engine:
        _check_sizes(engine.executor)
        found, _ = _run(engine, requests)
    assert _check_alike(found, expected) > 0.9 * len(found)


def _check_sizes(executor: Executor) -> None:
    """Assert that each stage has exactly the planned bytes of weights and blocks."""
    assert isinstance(executor, ThreadExecutor)
    for index, runner in enumerate(executor.runners):
        assert isinstance(runner.model, Decoder)
        weights = sum(target.tensor.nbytes for target in runner.model.weight_targets().values())
        assert weights == stage_weight_bytes(runner.model.config, index, 4, Sharding(pipeline=3))
        stage_layers = runner.model.layer_configs
        assert (
            len(runner.pool.caches)
            == len(stage_layers)
            == len(pipeline_stages(len(runner.model.config.layers), 3)[index])
        )
        block = sum(4 * layer.cache.numbers_per_token * 16 for layer in stage_layers if layer.cache.kind == "tokens")
        assert runner.pool._pool.shape == (executor.plan.num_blocks, block)
