"""Memory of a rank's accelerator compared with the planner: weights, cache and activations of real models, whole and
sharded, by shapes only (`fake_device`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pytest

pytest.importorskip("triton")

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.exec.build_runner import build_runner
from stoker_engine.kernels.triton.compile.compile_only import compile_only
from stoker_engine.parallel.communicator import SingleRank
from stoker_engine.parallel.join import Joined
from stoker_engine.parallel.layout import RankLayout
from stoker_engine.parallel.rank_groups import RankGroups
from stoker_engine.sizing.activations import activation_bytes
from stoker_engine.sizing.memory import Device
from stoker_engine.sizing.weight_sizes import Sharding

from ...support.engine.fake_device import (
    DEEPSEEK_V3,
    GIB,
    LLAMA_8B,
    LLAMA_70B,
    MIXTRAL,
    QWEN3_06B,
    SM_90,
    DeviceTrace,
    bytes_on_device,
    checkpoint,
    fake_device,
    prompts,
)

Meet = Callable[[int, RankLayout], Joined]
TOKENS: Final = 8192


class Case(NamedTuple):
    """A model with its serving options."""

    config: dict[str, Any]
    sizes: dict[str, Any]
    quantization: str | None = None
    memory_bytes: int = 80 * GIB


def of_tensors(size: int, **more: Any) -> dict[str, Any]:
    return {"tensor_parallel_size": size, **more}


CASES: Final = {
    "Qwen3-0.6B": Case(QWEN3_06B, {}),
    "Llama-3-8B fp8 with fp8 cache": Case(LLAMA_8B, {"kv_cache_dtype": "fp8"}, "fp8"),
    "Llama-3-8B in stages": Case(LLAMA_8B, {"pipeline_parallel_size": 2}),
    "Llama-3-70B by 8": Case(LLAMA_70B, of_tensors(8)),
    "Llama-3-70B int4 by 8": Case(LLAMA_70B, of_tensors(8), "int4"),
    "Mixtral-8x7B by 2": Case(MIXTRAL, of_tensors(2)),
    "Mixtral-8x7B by 8": Case(MIXTRAL, of_tensors(8)),
    "DeepSeek-V3 fp8 by 8": Case(DEEPSEEK_V3, of_tensors(8), "fp8", 141 * GIB),
    "DeepSeek-V3 int4 by 8, experts whole": Case(DEEPSEEK_V3, of_tensors(8, enable_expert_parallel=True), "int4"),
}


#: Families whose ranks hold more than others: biases added to sums, norms over all ranks' heads, head sizes.
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "GPTNeoX": {"num_key_value_heads": 32, "layer_norm_eps": 1e-5, "use_parallel_residual": True},
    "Cohere": {"layer_norm_eps": 1e-5, "logit_scale": 0.25, "use_qk_norm": True},
    "Olmo2": {"hidden_size": 1024, "intermediate_size": 512, "head_dim": 128},
}


class Held(NamedTuple):
    """Bytes of the loaded model, the additional peak of a prompt step, and bytes reserved for CUDA graphs."""

    loaded: int
    step: int
    graphs: int


def held(case: Case, meet: Meet, monkeypatch: pytest.MonkeyPatch, **sizes: Any) -> Held:
    """Return the memory of the first rank."""
    sizes = {"max_model_len": TOKENS, "max_num_batched_tokens": TOKENS, **case.sizes, **sizes}
    args = EngineArgs("m", device="cuda", **sizes)
    layout = RankLayout.of(args)
    joined = meet(0, layout) if layout.size > 1 else None
    try:
        groups = RankGroups() if joined is None else dataclasses.replace(joined.groups, engine=SingleRank())
        with monkeypatch.context() as patch, fake_device(patch, case.memory_bytes):
            before = bytes_on_device()
            with compile_only(SM_90, lambda kernel, key: None):
                runner = build_runner(args, checkpoint(case.config, case.quantization), groups=groups)
            loaded, trace = bytes_on_device() - before, DeviceTrace()
            with compile_only(SM_90, lambda kernel, key: None), trace:
                runner.run(prompts(*[TOKENS // 8] * 8))
            return Held(loaded, trace.peak, runner.plan.graph_bytes)
    finally:
        if joined is not None:
            joined.close()


#: Cases that are covered by others.
SLOW: Final = ("Llama-3-70B int4 by 8", "Mixtral-8x7B by 8", "DeepSeek-V3 fp8 by 8")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_total_memory_is_within_3_percent_of_the_plan(name: str, meet: Meet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache takes what remains, so that the total must equal the usable memory."""
    case = CASES[name]
    found = held(case, meet, monkeypatch, max_num_seqs=64)
    args = EngineArgs("m", **case.sizes)
    device = Device(case.memory_bytes, args.gpu_memory_utilization, on_cpu=False, sharding=RankLayout.of(args).sharding)
    planned = int(device.memory_bytes * device.utilization) - device.allowances - found.graphs
    assert 0.97 * planned <= found.loaded + found.step <= planned


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "tensor_parallel_size" in case.sizes])
def test_activations_of_a_rank_are_within_10_percent_of_the_plan(
    name: str, meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    # DeepSeek's first three layers are dense, and the last one holds less.
    config = {**CASES[name].config, "num_hidden_layers": 5}
    case = CASES[name]._replace(config=config)
    step = held(case, meet, monkeypatch, max_num_seqs=8, num_gpu_blocks_override=1024).step
    sharding = RankLayout.of(EngineArgs("m", **case.sizes)).sharding
    shape = checkpoint(config).config
    planned = activation_bytes(shape, TOKENS, 8, 2, sharding, fused=True)
    assert 0.9 * planned <= step <= planned


@pytest.mark.parametrize("family", FAMILIES)
def test_activations_of_other_families_stay_within_the_plan(
    family: str, meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**LLAMA_8B, "architectures": [f"{family}ForCausalLM"], "num_hidden_layers": 2, **FAMILIES[family]}
    case = Case(config, of_tensors(8))
    step = held(case, meet, monkeypatch, max_num_seqs=8, num_gpu_blocks_override=1024).step
    shape = checkpoint(config).config
    assert step <= activation_bytes(shape, TOKENS, 8, 2, Sharding(tensor=8), fused=True)
