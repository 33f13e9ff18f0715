"""Selection of the attention backend, and the errors if it is unavailable."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stoker_common.errors import ArgumentError
from stoker_engine.architectures.decoder_config import AttentionConfig
from stoker_engine.architectures.mla_config import MLAConfig
from stoker_engine.attention.cpu import CpuBackend
from stoker_engine.attention.external import AttentionRequirements, by_package
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.attention.select import attention_backend
from stoker_engine.contract.engine_args import EngineArgs

CPU = torch.device("cpu")
LAYER = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)


def requirements(
    dtype: torch.dtype, layer: AttentionConfig = LAYER, stored: str = "bfloat16", block_size: int = 256
) -> AttentionRequirements:
    return AttentionRequirements([LAYER, layer], dtype, stored, block_size)


def test_backend_is_the_named_or_the_fastest_one() -> None:
    assert isinstance(attention_backend(CPU, requirements(torch.float32)), CpuBackend)
    assert isinstance(attention_backend(CPU, requirements(torch.float16)), SdpaBackend)
    assert isinstance(attention_backend(CPU, requirements(torch.float32), name="native"), CpuBackend)
    assert isinstance(attention_backend(CPU, requirements(torch.float32), name="sdpa"), SdpaBackend)


@pytest.mark.parametrize(
    ("dtype", "name", "message"),
    [
        (torch.float16, "native", "not available for float16 on cpu: .*; choose auto or sdpa"),
        (torch.float32, "triton", "need a GPU, and this is a CPU; choose auto or sdpa"),
    ],
)
def test_unavailable_backends_are_refused(dtype: torch.dtype, name: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"--attention-backend: .*{message}"):
        attention_backend(CPU, requirements(dtype), name=name)  # type: ignore[arg-type]


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(ArgumentError, match="--attention-backend"):
        EngineArgs("model", attention_backend="xformers")  # type: ignore[arg-type]


def test_batch_invariance_is_refused_for_sdpa() -> None:
    with pytest.raises(ArgumentError, match=r"--batch-invariant.*Triton kernels.*--attention-backend sdpa"):
        attention_backend(CPU, requirements(torch.float32), batch_invariant=True, name="sdpa")


def test_float32_latent_attention_uses_sdpa_if_shared_memory_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    gpu = torch.device("cuda")
    for size, latent, dtype, taken in [
        (64, LATENT, torch.float32, "sdpa"),
        (64, LATENT, torch.bfloat16, "triton"),
        (64, LAYER, torch.float32, "triton"),
        (160, LATENT, torch.float32, "triton"),
    ]:
        properties = SimpleNamespace(shared_memory_per_block=size << 10)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, properties=properties: properties)
        backend = attention_backend(gpu, requirements(dtype, latent))
        assert type(backend).__name__.lower() == f"{taken}backend"
        if taken == "sdpa":
            with pytest.raises(ArgumentError, match=r"needs more shared memory .* choose auto or sdpa"):
                attention_backend(gpu, requirements(dtype, latent), name="triton")


LATENT = dataclasses.replace(LAYER, latent=MLAConfig(None, 64, 32, 16, 32))


@pytest.mark.parametrize(
    ("name", "requested", "message"),
    [
        ("flash-attn", requirements(torch.float32), r"bfloat16 and float16, not float32 \(--dtype\)"),
        ("flash-attn", requirements(torch.float16), r"not in bfloat16 \(--kv-cache-dtype\)"),
        ("flash-attn", requirements(torch.bfloat16, stored="float8_e4m3fn"), "not in float8_e4m3fn"),
        (
            "flash-attn",
            requirements(torch.bfloat16, block_size=16),
            r"multiples of 256 tokens, not 16 \(--block-size\)",
        ),
        (
            "flash-attn",
            requirements(torch.bfloat16, dataclasses.replace(LAYER, head_dim=84)),
            "multiples of 8 up to 256, not 84",
        ),
        ("flash-attn", requirements(torch.bfloat16, dataclasses.replace(LAYER, head_dim=264)), "up to 256, not 264"),
        (
            "flashinfer",
            requirements(torch.bfloat16, dataclasses.replace(LAYER, head_dim=96)),
            "head sizes 64, 128, 256, not 96",
        ),
        ("flashinfer", requirements(torch.bfloat16, dataclasses.replace(LAYER, alibi_slopes=(1.0,) * 4)), "ALiBi"),
        (
            "flashinfer",
            requirements(torch.bfloat16, dataclasses.replace(LAYER, sinks=True)),
            "not support attention sinks",
        ),
        ("flashinfer", requirements(torch.bfloat16, dataclasses.replace(LAYER, value_head_dim=32)), "not 64 and 32"),
        ("flashinfer", requirements(torch.bfloat16, LATENT), "not support latent attention"),
        ("fa3", requirements(torch.float32), r"bfloat16 and float16, not float32 \(--dtype\)"),
        ("fa3", requirements(torch.bfloat16, dataclasses.replace(LAYER, head_dim=84)), "multiples of 8 up to 256, not"),
        (
            "fa3",
            requirements(torch.bfloat16, dataclasses.replace(LAYER, logits_soft_cap=30.0)),
            "not support soft caps",
        ),
        ("fa3", requirements(torch.bfloat16, dataclasses.replace(LAYER, alibi_slopes=(1.0,) * 4)), "not support ALiBi"),
        ("fa3", requirements(torch.bfloat16, dataclasses.replace(LAYER, sinks=True)), "not support attention sinks"),
    ],
)
def test_packages_are_refused_for_unsupported_models(
    name: Any, requested: AttentionRequirements, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArgumentError, match=rf"--attention-backend: {name} .*is not installed; choose auto or sdpa"):
        by_package(name, requested, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: package)
    with pytest.raises(ArgumentError, match=f"{name} is not available: no GPU;"):
        by_package(name, requested, "no GPU")
    with pytest.raises(ArgumentError, match=f"--attention-backend: {name} .*{message}.*; choose auto or sdpa"):
        by_package(name, requested, None)


def test_fa3_needs_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: package)
    module = SimpleNamespace(flash_attn_with_kvcache=lambda: None)
    monkeypatch.setattr("importlib.import_module", {"flash_attn_interface": module}.__getitem__)
    for capability, runs in (((9, 0), True), ((8, 9), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        if runs:
            backend = attention_backend(torch.device("cuda"), requirements(torch.bfloat16, block_size=16), name="fa3")
            assert type(backend).__name__ == "FA3Backend"
        else:
            with pytest.raises(ArgumentError, match=r"fa3 is not available: .*capability 9\.0.*; choose auto or sdpa"):
                attention_backend(torch.device("cuda"), requirements(torch.bfloat16), name="fa3")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ArgumentError, match=r"fa3 is not available: .*NVIDIA GPU of compute capability 9"):
        attention_backend(torch.device("cuda"), requirements(torch.bfloat16), name="fa3")
