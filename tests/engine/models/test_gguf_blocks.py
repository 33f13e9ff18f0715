"""Models computed from GGUF's blocks: the bits of the dequantized values in float32, for every family."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader

from stoker_common.errors import ModelError, WeightsError
from stoker_engine.architectures.stored_formats import GGUF_FORMATS
from stoker_engine.attention.select import attention_backend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.engine import Engine
from stoker_engine.kernels.blocks import dequantize
from stoker_engine.kernels.cpu.library import cpu_library
from stoker_engine.kernels.select import select_kernels
from stoker_engine.layers.build import Build
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.gguf import gguf_tensor
from stoker_engine.models.loading import stored_weights
from stoker_engine.parallel.communicator import Communicator, SingleRank
from stoker_engine.quant.blocks import BlockMatrix
from stoker_engine.quant.weight_target import WeightTarget
from stoker_engine.sizing.weight_sizes import weight_bytes

from ...support.engine.gguf_random import quantized
from ...support.engine.served import served
from ...support.engine.tiny_configs import GGUF
from ...support.engine.tiny_models import random_model
from . import llama_cpp

_CPU = torch.device("cpu")
_Q8, _F32 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32

pytestmark = pytest.mark.skipif(
    cpu_library(_CPU, torch.float32) is None, reason="without the kernel, files are dequantized as they are loaded"
)

#: Sizes that become multiples of a block; the others are sizes of heads, and counts.
_WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "n_embd", "d_model", "ffn_hidden_size")
_FURTHER = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "shared_expert_intermediate_size")


def _in_blocks(options: dict[str, Any], size: int = 32) -> dict[str, Any]:
    """Return `options` with rows that are multiples of `size`."""
    wider = dict(options)
    for key, value in options.items():
        if isinstance(value, dict):
            wider[key] = _in_blocks(value, size)
        elif key in (*_WIDTHS, *_FURTHER) and value is not None:
            wider[key] = -(-value // size) * size
        elif key == "v_head_dim" or (key == "head_dim" and size > 32):  # 4 heads make whole blocks
            wider[key] = max(size // 4, 16)
    return wider


@dataclass(frozen=True)
class Shard:
    """One of several ranks, which only loads."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    all_gather = broadcast = all_reduce


def _model(
    path: Path, dtype: torch.dtype = torch.float32, ranks: Communicator | None = None, in_panels: bool = False
) -> Decoder:
    """Load a rank's shard of the model.

    Args:
        in_panels: pack the types that can be packed; this changes the order of sums.
    """
    checkpoint = find_checkpoint(EngineArgs(str(path)))
    ranks = ranks or SingleRank()
    kernels = select_kernels(_CPU, dtype)
    if not in_panels:
        kernels = replace(kernels, panels=None, block_panels=None)
    build = Build(dtype, attention_backend(_CPU, served(dtype)), kernels, ranks)
    model = checkpoint.load(build, _CPU, 128)
    assert isinstance(model, Decoder)
    return model


def _write(
    name: str,
    folder: Path,
    stored: Callable[[str], GGMLQuantizationType] = lambda name: _Q8,
    size: int = 32,
) -> tuple[Path, Path]:
    """Write a file in blocks, and one with the same values in float32."""
    kind, options = GGUF[name]
    theirs = random_model(kind, _in_blocks(options, size))
    paths = folder / "blocks.gguf", folder / "float32.gguf"
    for path, dequantized in zip(paths, (False, True), strict=True):
        llama_cpp.write(theirs, path, stored=stored, dequantized=dequantized, quantize=quantized)
    return paths


def _predicted(path: Path, model: Decoder, dtype: torch.dtype, tensor: int = 1) -> int:
    formats = find_checkpoint(EngineArgs(str(path))).weight_formats(dtype, _CPU)
    return weight_bytes(model.config, dtype.itemsize, tensor, formats=formats)


def _held(model: Decoder) -> int:
    return sum(target.tensor.nbytes for target in model.weight_targets().values())


def _matrices(model: Decoder) -> set[str]:
    """Return the names of parameters in blocks."""
    return {name for name, target in model.weight_targets().items() if target.stored is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", GGUF)
def test_blocks_of_every_family_have_the_bits_of_dequantized_weights(
    name: str, dtype: torch.dtype, tmp_path: Path, paged_run: Any
) -> None:
    blocks, plain = (_model(path, dtype) for path in _write(name, tmp_path))
    prompts = [[5, 100, 2, 77], list(range(2, 63))]
    ran = [paged_run(model, prompts, new_tokens=6, dtype=dtype) for model in (blocks, plain)]
    for ours, expected in zip(ran[0].sequences, ran[1].sequences, strict=True):
        assert ours.tokens == expected.tokens
        assert torch.equal(torch.stack(ours.logits), torch.stack(expected.logits))
    held = _matrices(blocks)
    assert _held(blocks) == _predicted(tmp_path / "blocks.gguf", blocks, dtype)
    assert _held(plain) == _predicted(tmp_path / "float32.gguf", plain, dtype) and not _matrices(plain)
    # All matrices except routers, gates, positions, and those that latent attention transposes.
    matrices = {key for key, target in blocks.weight_targets().items() if len(target.full_shape) > 1}
    left = {key for key in matrices - held if not any(part in key for part in ("router", "_gate", "positions", "k_b"))}
    assert not left and held


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("name", ["bloom", "gemma3", "gpt2", "llama biases", "olmo2", "phi3", "qwen3"])
def test_block_panels_are_close_to_dequantized_weights(name: str, kind: str, tmp_path: Path, paged_run: Any) -> None:
    """Results do not depend on a prompt's chunks."""
    if select_kernels(_CPU, torch.bfloat16).block_panels is None:
        pytest.skip("this ISA has no panels")
    paths = _write(name, tmp_path, lambda name: GGMLQuantizationType[kind], size=GGUF_FORMATS[kind].numbers)
    blocks, plain = (_model(path, torch.bfloat16, in_panels=True) for path in paths)
    packed = {name for name, module in blocks.named_modules() if isinstance(module, BlockMatrix) and module.is_packed}
    assert any("embed" in name for name in packed) and len(packed) > 4
    prompts = [[5, 100, 2, 77], list(range(2, 63))]
    whole, parts, expected = (
        paged_run(model, prompts, new_tokens=6, chunks=chunks, dtype=torch.bfloat16).sequences
        for model, chunks in ((blocks, (64,)), (blocks, (1, 3, 7)), (plain, (64,)))
    )
    for prompt, one, other, near in zip(prompts, whole, parts, expected, strict=True):
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))
        got, exact = (torch.stack(sequence.logits[: len(prompt)]) for sequence in (one, near))
        assert (got - exact).norm() <= 0.25 * exact.norm()  # a third of that is bfloat16's own rounding


#: Types by the rows that they support: multiples of 32, or of 256.
_TYPES = {
    size: [GGMLQuantizationType[format.name] for format in GGUF_FORMATS.values() if format.numbers <= size]
    for size in (32, 256)
}


@pytest.mark.parametrize(
    "name, size, seed",
    [
        ("bloom", 32, 1),
        ("deepseek_v3", 32, 2),
        ("falcon 40b", 32, 3),
        ("gpt2", 32, 4),
        ("phi3", 32, 5),
        ("qwen2_moe", 32, 6),
        ("gemma3", 256, 7),
        ("llama biases", 256, 8),
        ("llama head_dim", 256, 9),
        ("mixtral", 256, 10),
        ("olmo2", 256, 11),
        ("qwen3_moe", 256, 12),
    ],
)
def test_mixed_types_have_the_bits_of_dequantized_weights(
    name: str, size: int, seed: int, tmp_path: Path, paged_run: Any
) -> None:
    """Each matrix of a file has a random type."""
    drawn = dict[str, GGMLQuantizationType]()

    def stored(name: str) -> GGMLQuantizationType:
        return drawn.setdefault(name, random.Random(f"{seed} {name}").choice(_TYPES[size]))

    paths = _write(name, tmp_path, stored, size=size)
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    blocks, plain = (_model(path, dtype) for path in paths)
    ran = [paged_run(model, [list(range(2, 40))], new_tokens=4, dtype=dtype) for model in (blocks, plain)]
    assert torch.equal(*(torch.stack(run.sequences[0].logits) for run in ran))
    assert _held(blocks) == _predicted(paths[0], blocks, dtype)
    assert len({target.stored for target in blocks.weight_targets().values()}) > 4


def test_tied_head_shares_the_blocks_of_the_embedding(tmp_path: Path) -> None:
    blocks, _ = _write("llama biases", tmp_path)
    model = _model(blocks)
    assert model.lm_head.matrix is model.embed.matrix and isinstance(model.embed.matrix, BlockMatrix)


def test_parts_of_other_types_are_separate_matrices(tmp_path: Path, paged_run: Any) -> None:
    others = {"blk.0.attn_v.weight", "blk.1.ffn_up.weight", "blk.1.attn_output.weight", "token_embd.weight"}
    paths = _write("llama biases", tmp_path, lambda name: _F32 if name in others else _Q8)
    blocks, plain = map(_model, paths)
    assert _matrices(blocks) == {
        *(f"layers.0.{part}.weight" for part in ("q", "k", "o", "gate", "up", "down")),
        *(f"layers.1.{part}.weight" for part in ("q", "k", "v", "gate", "down")),
    }
    assert _held(blocks) == _predicted(paths[0], blocks, torch.float32)
    ran = [paged_run(model, [list(range(2, 40))], new_tokens=4) for model in (blocks, plain)]
    assert torch.equal(*(torch.stack(run.sequences[0].logits) for run in ran))


#: Sizes that 4 ranks can share in whole blocks, partly unequally.
_SHARED: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 128},
    "deepseek_v3": {"hidden_size": 64, "v_head_dim": 32, "moe_intermediate_size": 128, "intermediate_size": 224},
    "falcon 40b": {"hidden_size": 128},
    "gemma3": {"hidden_size": 64, "head_dim": 32, "intermediate_size": 224},
    "gpt2": {"n_embd": 128},
    "llama": {"hidden_size": 128, "intermediate_size": 224},
    "phi3": {"hidden_size": 128, "intermediate_size": 224},
    "qwen2_moe": {"hidden_size": 128, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 224},
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", _SHARED)
def test_each_rank_holds_and_reads_its_shard(
    name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, options = GGUF[name]
    theirs = random_model(kind, {**_in_blocks(options), **_SHARED[name]})
    path = llama_cpp.write(theirs, tmp_path / "model.gguf", stored=lambda name: _Q8)
    whole = _model(path)
    read = list[int]()

    def counted(descriptor: int, buffers: list[memoryview], start: int) -> int:
        read.append(os.preadv(descriptor, buffers, start))
        return read[-1]

    held = []
    for rank in range(ranks):
        read.clear()
        with monkeypatch.context() as patched:
            patched.setattr(gguf_tensor, "preadv", counted)
            model = _model(path, ranks=Shard(rank, ranks))
        targets = model.weight_targets()
        held.append(_held(model))
        assert _matrices(model) == _matrices(whole)
        for key, target in whole.weight_targets().items():
            assert torch.equal(_elements(targets[key]), targets[key].part_of(_elements(target))), key
        unread = sum(target.tensor.nbytes for key, target in targets.items() if "k_b" in key)
        assert sum(read) - unread <= held[-1]
    assert max(held) == _predicted(path, whole, torch.float32, ranks)


def _elements(target: WeightTarget) -> torch.Tensor:
    return (
        target.tensor
        if target.stored is None
        else dequantize(target.tensor, target.stored, target.inner, torch.float32)
    )


def test_ranks_that_would_cut_a_block_are_refused(tmp_path: Path) -> None:
    path, _ = _write("llama", tmp_path)  # heads of 16
    with pytest.raises(ModelError, match=r"blocks of 32 columns.*--tensor-parallel-size"):
        _model(path, ranks=Shard(1, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_without_a_kernel_files_are_dequantized(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.float32:
        monkeypatch.setattr(stored_weights, "cpu_library", lambda device, dtype: None)
    blocks, plain = (_model(path, dtype) for path in _write("llama", tmp_path))
    assert not _matrices(blocks)
    for name, target in plain.weight_targets().items():
        assert torch.equal(blocks.weight_targets()[name].tensor, target.tensor)
    assert _held(blocks) == _predicted(tmp_path / "blocks.gguf", blocks, dtype)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_nan_and_infinite_scales_are_refused_by_name(scale: float, tmp_path: Path) -> None:
    path, _ = _write("llama", tmp_path)
    name = "blk.1.ffn_down.weight"
    start = next(tensor.data_offset for tensor in GGUFReader(path).tensors if tensor.name == name)
    data = bytearray(path.read_bytes())
    data[start + 34 * 5 : start + 34 * 5 + 2] = np.float16(scale).tobytes()
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=rf"{name} holds nan or infinity"):
        _model(path)


@pytest.mark.parametrize("layer", ["9" * 5000, "99999999999", "2"])
def test_tensors_of_nonexistent_layers_take_no_memory(layer: str, tmp_path: Path) -> None:
    further = {f"blk.{layer}.attn_q.weight": torch.zeros(64, 64)}
    theirs = random_model("llama", _in_blocks(GGUF["llama"][1]))
    path = llama_cpp.write(theirs, tmp_path / "model.gguf", tensors=further, stored=lambda name: _Q8)
    model = _model(path)
    assert _held(model) == _predicted(path, model, torch.float32)


def test_rows_of_another_length_are_refused_by_name(tmp_path: Path) -> None:
    theirs = random_model("llama", _in_blocks(GGUF["llama"][1]))
    path = llama_cpp.write(theirs, tmp_path / "model.gguf", {"embedding_length": 48}, stored=lambda name: _Q8)
    with pytest.raises(WeightsError, match=r"has shape"):
        _model(path)


def test_kv_cache_gets_the_saved_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, plain = _write("qwen3", tmp_path)
    monkeypatch.setattr("stoker_engine.exec.kv_cache.memory_bytes", lambda *_: 2 * 1024**3)
    args = [EngineArgs(str(path), dtype="float32", max_num_seqs=4) for path in (blocks, plain)]
    plans = [Engine.from_args(each).executor.plan for each in args]
    saved = _held(_model(plain)) - _held(_model(blocks))
    block = 16 * 2 * 2 * 16 * 4 * 2  # tokens × keys and values × heads × size × float32 × layers
    assert abs(plans[0].num_blocks - plans[1].num_blocks - saved / block) <= 1
