"""Sizes that ranks cannot share are reported before any rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PhimoeConfig, PhimoeForCausalLM

from stoker_common.errors import ArgumentError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.engine import Engine
from stoker_engine.exec import rank_process
from stoker_engine.exec.check_sharding import refuse_indivisible
from stoker_engine.models.checkpoint import find_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"tensor_parallel_size": 3},
            "--tensor-parallel-size: tensor 3 does not divide the model's 8 attention heads; use 1 or 2",
        ),
        (
            {"pipeline_parallel_size": 3},
            "--pipeline-parallel-size: pipeline 3 is more than the model's 2 layers; use at most 2",
        ),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "--enable-expert-parallel: the model is not a mixture of experts; leave it out",
        ),
        (
            {"tensor_parallel_size": 8, "quantization": "int4"},
            "--tensor-parallel-size: tensor 8 splits the attention output's rows, 64, into 8 parts of 8, which are "
            "not whole blocks of 32 as uint4 in groups of 32 stores them; use 1 or 2",
        ),
    ],
)
def test_bad_sizes_start_no_rank(
    sizes: dict[str, Any], message: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_process, "RankProcess", None)
    with pytest.raises(ArgumentError) as caught:
        Engine.from_args(EngineArgs(str(tiny), device="cpu", **sizes))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("sizes", "flag", "remedy"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size", "leave it out"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size", "leave it out"),
        ({"enable_expert_parallel": True}, "--enable-expert-parallel", "leave it out"),
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enable_expert_parallel": True},
            "--tensor-parallel-size",
            "leave it out and --pipeline-parallel-size and --enable-expert-parallel",
        ),
    ],
)
def test_models_on_the_transformers_backend_are_not_sharded(
    sizes: dict[str, Any], flag: str, remedy: str, tmp_path: Path
) -> None:
    """The model is a mixture, so the message must not say that it has no experts."""
    common = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = PhimoeConfig(vocab_size=64, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, **common)
    PhimoeForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ArgumentError) as caught:
        Engine.from_args(EngineArgs(str(tmp_path), device="cpu", **sizes))
    message = "PhimoeForCausalLM runs on the Transformers backend, which does not support sharding"
    assert str(caught.value) == f"{flag}: {message}; {remedy}"


def test_good_sizes_are_accepted(tiny: Path) -> None:
    for sizes in ({}, {"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}):
        args = EngineArgs(str(tiny), device="cpu", **sizes)
        refuse_indivisible(args, find_checkpoint(args))
