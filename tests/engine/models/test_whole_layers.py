"""Layers in one call of the CPU's kernels have the bits of separate operations, for every family that supports it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from stoker_engine.attention.cpu import CpuBackend
from stoker_engine.attention.select import attention_backend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.kernels.cpu.library import cpu_library
from stoker_engine.kernels.select import select_kernels
from stoker_engine.layers.build import Build
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.models.decoder import Decoder, LayerRun

from ...support.engine.gguf_random import quantized
from ...support.engine.served import served
from ...support.engine.tiny_configs import GGUF
from ...support.engine.tiny_models import random_model
from . import llama_cpp

_CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(cpu_library(_CPU, torch.float32) is None, reason="there are no CPU kernels")


WHOLE = (
    "gemma",
    "gemma2",
    "gemma3",
    "glm4",
    "granite",
    "llama",
    "llama biases",
    "llama head_dim",
    "phi3",
    "qwen2",
    "qwen3",
)
#: Families with other layers: norms with biases, norms over all heads, experts, parallel attention and MLP.
IN_PARTS = ("gpt2", "olmo2", "mixtral", "falcon 7b")

#: Sizes for which rows are whole blocks.
_IN_BLOCKS = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def _loaded(path: Path, dtype: torch.dtype, max_model_len: int = 128) -> Decoder:
    checkpoint = find_checkpoint(EngineArgs(str(path)))
    build = Build(dtype, attention_backend(_CPU, served(dtype)), select_kernels(_CPU, dtype))
    model = checkpoint.load(build, _CPU, max_model_len)
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stored", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_layers_have_the_bits_of_separate_operations(
    name: str, stored: str, dtype: torch.dtype, tmp_path: Path, paged_run: Any
) -> None:
    """Weights are unquantized or in blocks; prompts have one token, or exceed windows and blocks."""
    kind, options = GGUF[name]
    format = GGMLQuantizationType[stored]
    if stored == "Q8_0":
        options = {key: _IN_BLOCKS.get(key, value) for key, value in options.items()}
    theirs, path = random_model(kind, options), tmp_path / "model.gguf"
    llama_cpp.write(theirs, path, stored=lambda _: format, quantize=quantized)
    model = _loaded(path, dtype)
    prompts = [[5], [5, 100, 2, 77], list(range(2, 63))]
    _same_in_parts(model, lambda: paged_run(model, prompts, new_tokens=5, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma3", "phi3"])
def test_large_steps_have_the_bits_of_separate_operations(
    name: str, dtype: torch.dtype, tmp_path: Path, paged_run: Any
) -> None:
    """Steps have row counts around what an MLP processes at once, and more; keys have several splits."""
    kind, options = GGUF[name]
    path = tmp_path / "model.gguf"
    llama_cpp.write(random_model(kind, options), path, stored=lambda _: GGMLQuantizationType.F32)
    model = _loaded(path, dtype, max_model_len=2048)
    prompts = [[at * 7 % 90 + 2 for at in range(length)] for length in (1100, 256, 600)]
    chunks = 1, 128, 255, 256, 257, 600
    _same_in_parts(model, lambda: paged_run(model, prompts, new_tokens=2, dtype=dtype, chunks=chunks))


def test_whole_and_separate_layers_may_alternate(
    tmp_path: Path, paged_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four layers, two consecutive ones run in one call; the last one computes only the needed rows."""
    kind, options = GGUF["gemma3"]
    path = tmp_path / "model.gguf"
    tiny = random_model(kind, {**options, "num_hidden_layers": 4})
    llama_cpp.write(tiny, path, stored=lambda _: GGMLQuantizationType.F32)
    expected = paged_run(_loaded(path, torch.bfloat16), [[5], list(range(2, 63))], new_tokens=5, dtype=torch.bfloat16)
    takes = iter([True, True, False, True, False, True, True, False])
    monkeypatch.setattr(CpuBackend, "takes", lambda *_: next(takes))
    for lengths in ([2, 1, 1], [1, 2, 1]):
        model = _loaded(path, torch.bfloat16)
        assert [len(run.layers) for run in model.runs] == lengths
        mixed = paged_run(model, [[5], list(range(2, 63))], new_tokens=5, dtype=torch.bfloat16)
        for ours, expected_sequence in zip(mixed.sequences, expected.sequences, strict=True):
            assert torch.equal(torch.stack(ours.logits), torch.stack(expected_sequence.logits))


def _same_in_parts(model: Decoder, run: Callable[[], Any]) -> None:
    """Assert that `run` gives the same bits when each layer's operations are called one by one."""
    assert [each.whole is not None for each in model.runs] == [True]
    whole = run()
    model.runs = [LayerRun(0, model.runs[0].layers)]
    apart = run()
    for ours, expected in zip(whole.sequences, apart.sequences, strict=True):
        assert ours.tokens == expected.tokens
        assert torch.equal(torch.stack(ours.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("name", IN_PARTS)
def test_unsupported_layers_run_as_separate_operations(name: str, tmp_path: Path) -> None:
    kind, options = GGUF[name]
    path = tmp_path / "model.gguf"
    llama_cpp.write(random_model(kind, options), path, stored=lambda _: GGMLQuantizationType.F32)
    assert all(run.whole is None for run in _loaded(path, torch.float32).runs)
