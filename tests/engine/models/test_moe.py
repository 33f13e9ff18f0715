"""The mixture-of-experts layer, compared with transformers' routers and experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import (
    DbrxConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    GraniteMoeConfig,
    MixtralConfig,
    Qwen2MoeConfig,
)
from transformers.models.dbrx.modeling_dbrx import DbrxFFN
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeMoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from stoker_engine.architectures.moe_config import MoEConfig
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.kernels.moe import route
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.layers.build import Build
from stoker_engine.layers.moe import MoE

BUILD = Build(torch.float32, SdpaBackend(), REFERENCE)
HIDDEN, SIZE, EXPERTS, TOP = 32, 24, 8, 3
_SHAPE = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP, "moe_intermediate_size": SIZE}
_GROUPS = {"n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}

#: By name: transformers' module, and the same layer's config.
CASES: dict[str, tuple[Any, MoEConfig]] = {
    "mixtral": (
        lambda: MixtralSparseMoeBlock(
            MixtralConfig(
                hidden_size=HIDDEN, intermediate_size=SIZE, num_local_experts=EXPERTS, num_experts_per_tok=TOP
            )
        ),
        MoEConfig(EXPERTS, TOP, SIZE),
    ),
    "granite": (
        lambda: GraniteMoeMoE(
            GraniteMoeConfig(
                hidden_size=HIDDEN, intermediate_size=SIZE, num_local_experts=EXPERTS, num_experts_per_tok=TOP
            )
        ),
        MoEConfig(EXPERTS, TOP, SIZE),
    ),
    "qwen2": (
        lambda: Qwen2MoeSparseMoeBlock(
            Qwen2MoeConfig(num_experts=EXPERTS, shared_expert_intermediate_size=40, norm_topk_prob=False, **_SHAPE)
        ),
        MoEConfig(EXPERTS, TOP, SIZE, normalize=None, shared_intermediate_size=40, shared_gate=True),
    ),
    "deepseek_v2": (
        lambda: DeepseekV2Moe(DeepseekV2Config(topk_method="group_limited_greedy", **_SHAPE, **_GROUPS)),
        MoEConfig(
            EXPERTS,
            TOP,
            SIZE,
            normalize=None,
            num_groups=4,
            topk_groups=2,
            routed_scaling_factor=1.5,
            shared_intermediate_size=2 * SIZE,
        ),
    ),
    "deepseek_v3": (
        lambda: DeepseekV3MoE(DeepseekV3Config(n_shared_experts=1, **_SHAPE, **_GROUPS)),
        MoEConfig(
            EXPERTS,
            TOP,
            SIZE,
            scoring="sigmoid",
            correction_bias=True,
            num_groups=4,
            topk_groups=2,
            group_score="top2",
            routed_scaling_factor=1.5,
            shared_intermediate_size=SIZE,
        ),
    ),
    "dbrx": (
        lambda: DbrxFFN(
            DbrxConfig(
                d_model=HIDDEN,
                ffn_config={
                    "ffn_hidden_size": SIZE,
                    "moe_num_experts": EXPERTS,
                    "moe_top_k": TOP,
                    "moe_normalize_expert_weights": 2.0,
                },
            )
        ),
        MoEConfig(EXPERTS, TOP, SIZE, normalize=2.0),
    ),
}


def _copy(ours: MoE, theirs: dict[str, torch.Tensor]) -> None:
    """Copy the weights of transformers' module, whose names differ by family."""
    targets = {name.removeprefix("layers.0."): target.tensor for name, target in ours.weight_targets().items()}

    def find(*ends: str) -> torch.Tensor:
        return next(tensor for name, tensor in theirs.items() if name.endswith(ends))

    if "experts.mlp.w1" in theirs:  # DBRX
        gate, up, down = (theirs[f"experts.mlp.{name}"].view(EXPERTS, SIZE, HIDDEN) for name in ("w1", "v1", "w2"))
        down = down.transpose(1, 2)
    else:
        gate, up = find("experts.gate_up_proj").chunk(2, dim=1)
        down = find("experts.down_proj")
    for expert in range(EXPERTS):
        for part, stack in (("gate", gate), ("up", up), ("down", down)):
            targets.pop(f"experts.{expert}.{part}.weight").copy_(stack[expert])
    for name, target in targets.items():
        if name == "router.weight":
            target.copy_(find("gate.weight", "router.weight", "router.layer.weight"))
        elif name == "router.correction_bias":
            target.copy_(find("e_score_correction_bias"))
        elif name == "shared_gate.weight":
            target.copy_(find("shared_expert_gate.weight"))
        else:
            part = name.split(".")[1]
            shared = (key for key in theirs if ".shared_expert" in f".{key}" and f"{part}_proj" in key)
            target.copy_(theirs[next(shared)])


@pytest.mark.parametrize("name", CASES)
def test_moe_layer_equals_that_of_transformers(name: str) -> None:
    assert_layer_is(name, BUILD)


def assert_layer_is(name: str, build: Build) -> None:
    """Assert that a case's layer with these kernels gives the results of transformers' module."""
    make, config = CASES[name]
    torch.manual_seed(0)
    theirs = make().float().eval()
    tensors = dict(theirs.state_dict())
    for tensor in tensors.values():
        tensor.normal_(std=0.4)
    ours = MoE(build, "layers.0", config, HIDDEN, "silu")
    _copy(ours, tensors)
    x = torch.randn(50, HIDDEN)
    with torch.inference_mode():
        expected = theirs(x.unsqueeze(0))[0]
        torch.testing.assert_close(ours(x), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_weight_targets_cover_all_parameters(name: str) -> None:
    config = CASES[name][1]
    ours = MoE(BUILD, "layers.0", config, HIDDEN, "silu")
    targets = {name: target.tensor for name, target in ours.weight_targets().items()}
    for number, target in enumerate(targets.values()):
        target.fill_(number + 1.0)
    assert all(bool((parameter != 0).all()) for parameter in ours.parameters())
    counted = sum(target.numel() for target in targets.values()) - (EXPERTS if config.correction_bias else 0)
    assert counted == config.weights(HIDDEN)
    assert [float(target.flatten()[0]) for target in targets.values()] == [
        i + 1.0 for i in range(len(targets))
    ]  # no overlap


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_output_is_the_weighted_sum_of_the_chosen(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    gate_up, down = torch.randn(EXPERTS, 2 * SIZE, HIDDEN), torch.randn(EXPERTS, HIDDEN, SIZE)
    x = torch.randn(17, HIDDEN)
    weights, chosen = route(torch.randn(17, EXPERTS), MoEConfig(EXPERTS, TOP, SIZE))
    expected = torch.zeros(17, HIDDEN)
    for token in range(17):
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected[token] += weight * (down[expert] @ (functional.silu(gate) * up))
    out = REFERENCE.experts(gate_up.to(dtype), down.to(dtype), "silu")(x.to(dtype), weights, chosen)
    assert out.dtype is dtype
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 2.0, "rtol": 0.05}
    torch.testing.assert_close(out.float(), expected, **tolerance)


def test_empty_batch_is_accepted() -> None:
    layer = MoE(BUILD, "layers.0", MoEConfig(EXPERTS, TOP, SIZE), HIDDEN, "silu")
    assert layer(torch.empty(0, HIDDEN)).shape == (0, HIDDEN)
