"""The planner accepts exactly the sizes for which the engine can build its layers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stoker_common.errors import ArgumentError, ModelError
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.exec import check_sharding
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.layers.build import Build
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.loading.stored_weights import with_formats
from stoker_engine.parallel.communicator import SingleRank
from stoker_engine.quant.unquantized import UNQUANTIZED
from stoker_engine.sizing.planned_formats import on_load_formats
from stoker_engine.sizing.weight_formats import ALL_NUMBERS, WeightFormats
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.planner import study

#: Reasons about the sharding of a model.
DIVISION = {"HeadsNotDivisible", "KVHeadsNotDivisible", "ShardsNotDivisible", "ExpertsNotDivisible"}


@dataclass
class Seat(SingleRank):
    """A rank that never communicates."""

    rank: int
    size: int


def drawn(dice: random.Random) -> tuple[dict[str, Any], str | None]:
    """Return a random config, and how it is quantized on load."""
    heads = dice.choice([2, 4, 6, 8, 12])
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": dice.choice([7, 97, 128]),
        "hidden_size": 128,
        "intermediate_size": dice.choice([3, 7, 96, 101, 128, 160, 1024]),
        "num_hidden_layers": dice.choice([1, 2]),
        "num_attention_heads": heads,
        "num_key_value_heads": dice.choice([each for each in range(1, heads + 1) if heads % each == 0]),
        "head_dim": dice.choice([8, 32, 64]),
        "max_position_embeddings": 4096,
    }
    if dice.random() < 0.4:
        config |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
    return config, dice.choice([None, None, "int8", "int4"])


def refused(config: ModelConfig, ranks: int, formats: WeightFormats) -> bool:
    """Return whether any rank's layers refuse the config."""
    for rank in range(ranks):
        linear = with_formats(formats, lambda _: UNQUANTIZED)
        try:
            with torch.device("meta"):
                Decoder(config, Build(torch.float32, SdpaBackend(), REFERENCE, Seat(rank, ranks), linear), 64)
        except ModelError:
            return True
    return False


@pytest.mark.parametrize("seed", range(30))
def test_planner_refuses_exactly_the_sizes_that_the_engine_refuses(seed: int, spec: Callable[..., Spec]) -> None:
    dice = random.Random(seed)
    stated, quantization = drawn(dice)
    config = ModelConfig.from_dict(stated)
    formats = on_load_formats(config, quantization, on_cpu=True) if quantization else ALL_NUMBERS
    for ranks in (1, 2, 3, 4):
        tested_spec = spec(
            "hf://org/m",
            "cpu",
            hardware={"resources": {"limits": {"memory": "64Gi"}}},
            parallelism={"tensor": ranks, "data": dice.choice([1, 2])},
            **{"runtime": "stoker", "dtype": "float32", **({"quantization": quantization} if quantization else {})},
        )
        found = study(tested_spec, Catalogue.load(), stated)
        reasons = {each.reason for each in found.unplannable}
        assert reasons <= DIVISION, reasons
        assert bool(reasons) == refused(config, ranks, formats), (ranks, reasons)


def start_objection(stated: dict[str, Any], quantization: str | None, sizes: dict[str, int], device: str) -> str:
    """Return the engine's error at its start; empty if there is none."""
    config = ModelConfig.from_dict(stated)
    formats = on_load_formats(config, quantization, device == "cpu") if quantization else ALL_NUMBERS
    checkpoint: Any = SimpleNamespace(config=config, weight_formats=lambda *_: formats, quantization=None)
    try:
        args = EngineArgs(
            "m",
            dtype="float32",
            device=device,
            quantization=quantization,
            tensor_parallel_size=sizes["tensor"],
            pipeline_parallel_size=sizes["pipeline"],
            data_parallel_size=sizes["data"],
            enable_expert_parallel=sizes.get("expert", 1) > 1,
        )
        with pytest.MonkeyPatch.context() as patch:  # neither the device nor the files exist
            patch.setattr(check_sharding, "resolve_device", lambda _: torch.device(device))
            patch.setattr(check_sharding, "resolve_dtype", lambda *_: torch.float32)
            check_sharding.refuse_indivisible(args, checkpoint)
    except ArgumentError as error:
        return error.message
    return ""


@pytest.mark.parametrize("seed", range(60))
def test_refusals_equal_the_engines_messages(seed: int, spec: Callable[..., Spec]) -> None:
    """Also for stages, whole experts and data-parallel engines, on each kind of device."""
    dice = random.Random(1000 + seed)
    stated, quantization = drawn(dice)
    sizes = {"tensor": dice.choice([1, 2, 3, 4]), "pipeline": dice.choice([1, 1, 2, 3]), "data": dice.choice([1, 1, 2])}
    accelerator = dice.choice(["cpu", "nvidia-h100-80gb"])
    if sizes["tensor"] > 1 and dice.random() < 0.4:
        sizes["expert"] = sizes["tensor"]
    hardware: dict[str, Any] = {"resources": {"limits": {"memory": "64Gi"}}}
    if accelerator != "cpu":
        hardware = {"count": sizes["tensor"] * sizes["pipeline"] * sizes["data"]}
    engine = {"runtime": "stoker", "dtype": "float32", "image": "mine:1"}
    if quantization:
        engine["quantization"] = quantization
    found = study(
        spec("hf://org/m", accelerator, hardware=hardware, parallelism=sizes, **engine), Catalogue.load(), stated
    )
    refusals = [each.message for each in (*found.refused, *found.unplannable)]
    objection = start_objection(stated, quantization, sizes, "cpu" if accelerator == "cpu" else "cuda")
    assert bool(refusals) == bool(objection), (refusals, objection)
    # If two things are wrong, either may be reported.
    two = "expert" in sizes and sizes["data"] > 1 and "num_local_experts" not in stated
    assert two or not objection or any(each in objection for each in refusals), (refusals, objection)
