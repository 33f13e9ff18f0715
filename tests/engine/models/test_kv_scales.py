"""A checkpoint's KV-cache scales: their names in files; used, ignored and refused ones."""

from __future__ import annotations

import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stoker_common.errors import ArgumentError, WeightsError
from stoker_engine import LLM, SamplingParams
from stoker_engine.architectures.quantization.read import kv_cache_of
from stoker_engine.attention.select import attention_backend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.kernels.select import select_kernels
from stoker_engine.layers.build import Build
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.models.decoder_loader import DecoderLoader
from stoker_engine.parallel.layout import RankLayout

from ...support.engine.served import served
from ...support.engine.thread_ranks import thread_engine
from ...support.engine.tiny_models import save_model, tiny_llama_model

KEY, VALUE = 0.031, 0.0042
SPELLINGS = {
    "compressed-tensors": {"self_attn.k_scale": KEY, "self_attn.v_scale": VALUE},
    "vllm": {"self_attn.attn.k_scale": KEY, "self_attn.attn.v_scale": VALUE},
    "modelopt": {"self_attn.k_proj.k_scale": KEY, "self_attn.v_proj.v_scale": VALUE},
    "older": {"self_attn.k_proj.output_scale": KEY, "self_attn.v_proj.output_scale": VALUE},
    "with unused scales": {
        "self_attn.k_scale": KEY,
        "self_attn.v_scale": VALUE,
        "self_attn.q_scale": 0.5,
        "self_attn.prob_scale": 0.5,
    },
    "one for keys and values": {"self_attn.kv_scale": KEY},
    "keys only": {"self_attn.k_scale": KEY},
}


def with_scales(source: Path, folder: Path, scales: dict[str, torch.Tensor | float], layers: int = 2) -> Path:
    """Return a copy of a model with scales in its first layers."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(layers):
        tensors |= {f"model.layers.{layer}.{name}": torch.as_tensor(scale).clone() for name, scale in scales.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def stated(llm: LLM) -> list[tuple[float, float]]:
    """Return the scales of each layer's first head."""
    caches = llm.engine.executor.runner.pool.caches  # type: ignore[attr-defined]
    return [(float(cache.key_scales[3, 1, 0]), float(cache.value_scales[3, 1, 0])) for cache in caches]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_scales_are_read_under_all_names(tiny_llama: Path, tmp_path: Path, spelling: str) -> None:
    llm = LLM(str(with_scales(tiny_llama, tmp_path / "m", SPELLINGS[spelling])), kv_cache_dtype="fp8")
    value = KEY if spelling in ("one for keys and values", "keys only") else VALUE
    assert stated(llm) == [(pytest.approx(KEY), pytest.approx(value))] * 2


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 4},
        {"pipeline_parallel_size": 3},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    ],
    ids=str,
)
def test_each_rank_has_the_scales_of_its_layers_and_heads(sizes: dict[str, Any], tmp_path: Path) -> None:
    """One scale per head, all different; four ranks hold each of two heads twice."""
    layers, heads = 5, 2
    model = save_model(tmp_path / "plain", tiny_llama_model(num_hidden_layers=layers, num_key_value_heads=heads))
    scale_values = torch.arange(1, 2 * layers * heads + 1).view(2, layers, heads) / 64
    scales = {
        f"{layer}.self_attn.{name}": scale[layer]
        for layer in range(layers)
        for name, scale in zip("kv", scale_values, strict=True)
    }
    shutil.copytree(model, tmp_path / "m")
    tensors = load_file(model / "model.safetensors")
    tensors |= {f"model.layers.{name}_scale": scale.clone() for name, scale in scales.items()}
    save_file(tensors, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    args = EngineArgs(str(tmp_path / "m"), device="cpu", kv_cache_dtype="fp8", num_gpu_blocks_override=8, **sizes)
    layout = RankLayout.of(args)
    with thread_engine(args) as engine:
        for rank, runner in enumerate(engine.executor.runners):  # type: ignore[attr-defined]
            tp_rank, stage_layers = layout.place_of(rank), layout.stage_of(rank).layers(layers)
            mine = range(heads)[tp_rank * heads // layout.tensor :][: max(heads // layout.tensor, 1)]
            for kind, of in enumerate(("key_scales", "value_scales")):
                found = [getattr(cache, of)[3, 1].flatten().tolist() for cache in runner.pool.caches]
                assert found == [[scale_values[kind, layer, head].item() for head in mine] for layer in stage_layers]


def test_keys_and_values_are_divided_by_their_scale(tiny_llama: Path, tmp_path: Path) -> None:
    """transformers' keys, divided by the scale, in torch's float8."""
    folder = with_scales(tiny_llama, tmp_path / "m", SPELLINGS["compressed-tensors"])
    llm = LLM(str(folder), kv_cache_dtype="fp8_e4m3", num_gpu_blocks_override=8)
    prompt = [7, 300, 41, 5, 6, 90, 8]
    llm.engine.add(EngineRequest("one", prompt, SamplingParams(), 2, 0, frozenset()))
    llm.engine.step()
    [[block]] = llm.engine.scheduler.running[0].blocks
    cache = llm.engine.executor.runner.pool.caches[0]  # type: ignore[attr-defined]
    theirs = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.inference_mode():
        layer = theirs(torch.tensor([prompt]), use_cache=True).past_key_values.layers[0]
    for kind, scale in (("key", KEY), ("value", VALUE)):
        whole = getattr(layer, f"{kind}s")[0].transpose(0, 1)
        expected = (whole / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        stored = getattr(cache, kind)[block, : len(prompt)].float()
        # Values between two codes may be rounded to either.
        assert (stored != expected).float().mean() < 0.02
        torch.testing.assert_close(stored, expected, rtol=0.13, atol=0.002)
    while llm.engine.has_work:
        llm.engine.step()


def test_other_cache_dtypes_ignore_the_scales(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_scales(tiny_llama, tmp_path / "m", SPELLINGS["vllm"])
    with caplog.at_level(logging.INFO):
        for name in ("auto", "int8_per_token_head"):
            LLM(str(folder), kv_cache_dtype=name)
            assert f"--kv-cache-dtype {name} ignores the checkpoint's KV-cache scales" in caplog.text


def test_missing_scales_are_one(tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert stated(LLM(str(tiny_llama), kv_cache_dtype="fp8")) == [(1.0, 1.0)] * 2
    assert caplog.text.count("the checkpoint states no scales for keys and values in fp8: 1.0 is used") == 1
    some = with_scales(tiny_llama, tmp_path / "m", SPELLINGS["one for keys and values"], layers=1)
    assert stated(LLM(str(some), kv_cache_dtype="fp8")) == [(pytest.approx(KEY), pytest.approx(KEY)), (1.0, 1.0)]
    assert "no scales for 1 layers" in caplog.text


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (0.0, "k_scale holds 0.0; a scale must be a positive number"),
        (-1.0, "k_scale holds -1.0; a scale must be a positive number"),
        (torch.nan, "k_scale holds nan; a scale must be a positive number"),
        (torch.inf, "k_scale holds inf; a scale must be a positive number"),
        (torch.ones(3), "k_scale holds 3 scales; expected one, or one for each key-value head"),
        (torch.ones(0), "k_scale holds 0 scales; "),
        (torch.ones(1, dtype=torch.int32), "k_scale holds int32"),
    ],
    ids=str,
)
def test_invalid_scales_are_refused(
    tiny_llama: Path, tmp_path: Path, scale: torch.Tensor | float, message: str
) -> None:
    folder = with_scales(tiny_llama, tmp_path / "m", {"self_attn.k_scale": scale, "self_attn.v_scale": 1.0})
    with pytest.raises(WeightsError, match=re.escape(message)):
        LLM(str(folder), kv_cache_dtype="fp8")


def test_fp8_e5m2_cache_refuses_kv_scales(tiny_llama: Path, tmp_path: Path) -> None:
    folder = with_scales(tiny_llama, tmp_path / "m", SPELLINGS["vllm"])
    with pytest.raises(ArgumentError, match="fp8_e5m2 uses no scales, but the checkpoint has scales for fp8_e4m3"):
        LLM(str(folder), kv_cache_dtype="fp8_e5m2")


@pytest.mark.parametrize(
    ("config", "stated"),
    [
        ({}, ""),
        ({"kv_cache_scheme": None}, ""),
        ({"kv_cache_scheme": {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "tensor"}}, "fp8"),
        ({"kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"kv_cache_scheme": {"num_bits": 4, "symmetric": False}}, "{'num_bits': 4, 'symmetric': False}"),
        ({"kv_cache_scheme": "garbage"}, "garbage"),
    ],
    ids=str,
)
def test_scales_for_another_cache_format_are_refused(
    config: dict[str, Any], stated: str, tiny_llama: Path, tmp_path: Path
) -> None:
    assert kv_cache_of({"quantization_config": config}) == stated
    checkpoint = find_checkpoint(EngineArgs(str(with_scales(tiny_llama, tmp_path / "m", SPELLINGS["vllm"]))))
    assert isinstance(checkpoint.loader, DecoderLoader)
    loader, cpu = replace(checkpoint.loader, kv_cache=stated), torch.device("cpu")
    build = Build(torch.float32, attention_backend(cpu, served(torch.float32)), select_kernels(cpu, torch.float32))
    assert not loader.kv_scales("int8_per_token_head", checkpoint.config, build)
    if stated in ("", "fp8"):
        assert len(loader.kv_scales("fp8", checkpoint.config, build)) == 2
        return
    with pytest.raises(ArgumentError, match=f"keys and values in {re.escape(stated)}; use fp8_per_token_head"):
        loader.kv_scales("fp8", checkpoint.config, build)
