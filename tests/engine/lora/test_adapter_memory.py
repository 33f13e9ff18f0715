"""An adapter takes the memory that the planner counts if its files have one A per matrix, otherwise less."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stoker_common.errors import AdapterError
from stoker_engine.attention.select import attention_backend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.adapter import AdapterSource
from stoker_engine.kernels.cpu.library import cpu_library
from stoker_engine.kernels.select import select_kernels
from stoker_engine.layers.batch_rows import BatchRows
from stoker_engine.layers.build import Build
from stoker_engine.lora.adapter_reader import adapter_reader
from stoker_engine.lora.loaded_adapters import LoadedAdapters
from stoker_engine.models.checkpoint import Checkpoint, find_checkpoint
from stoker_engine.parallel.communicator import SingleRank
from stoker_engine.sizing.lora import adapter_bytes
from stoker_engine.sizing.pipeline_stages import Stage
from stoker_engine.sizing.weight_sizes import Sharding

from ...support.engine.peft_adapters import PeftAdapters
from ...support.engine.served import served
from ...support.engine.tiny_configs import FAMILIES
from ...support.engine.tiny_models import tiny_family, tiny_mixture

CPU, DTYPE = torch.device("cpu"), torch.bfloat16
#: Families whose files have one A per matrix.
EXACT = ("llama", "gemma3", "gptj", "cohere2")


class Rank(SingleRank):
    """One of several ranks, which never communicates."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def adapters_of(args: EngineArgs, checkpoint: Checkpoint, split: Sharding, stage: int) -> LoadedAdapters:
    """Return the adapters of the first rank of a stage, ready to load."""
    rows = BatchRows()
    loaded = LoadedAdapters(
        adapter_reader(checkpoint, args, DTYPE), DTYPE, args.max_loras, CPU, cpu_library(CPU, DTYPE)
    )
    build = Build(
        DTYPE, attention_backend(CPU, served(DTYPE)), select_kernels(CPU, DTYPE), Rank(0, split.tensor),
        stage=Stage(stage, split.pipeline), whole_experts=split.expert > 1, rows=rows, extend=loaded.extend,
    )  # fmt: skip
    checkpoint.load(build, CPU, 256)
    rows.adapters = torch.tensor([-1])
    loaded.settle(rows)
    return loaded


def args_of(folder: Path, **options: Any) -> EngineArgs:
    return EngineArgs(str(folder), dtype="bfloat16", device="cpu", enable_lora=True, max_lora_rank=64, **options)


def adapter_on(folder: Path, adapter: Path, split: Sharding, stage: int, **options: Any) -> tuple[int, int]:
    """Return an adapter's bytes on the first rank of a stage, and the counted bytes."""
    args = args_of(folder, **options)
    checkpoint = find_checkpoint(args)
    found = adapters_of(args, checkpoint, split, stage).load(AdapterSource(0, "adapter", str(adapter)))
    formats = checkpoint.weight_formats(DTYPE, CPU)
    return found.num_bytes, adapter_bytes(checkpoint.config, found.rank, DTYPE.itemsize, split, formats)[stage]


@pytest.mark.parametrize("rank", [16, 8])
@pytest.mark.parametrize("name", [*EXACT, "phi3", "gpt2", "mixtral", "qwen2_moe", "deepseek_v3"])
def test_adapter_takes_the_planned_bytes(name: str, rank: int, tmp_path: Path) -> None:
    theirs = tiny_family(name) if name in FAMILIES else tiny_mixture(name)
    theirs.save_pretrained(tmp_path)
    adapter = PeftAdapters(theirs).save_adapter(tmp_path / "adapters", r=rank)
    splits = [Sharding(), Sharding(tensor=2), Sharding(pipeline=2), Sharding(tensor=2, pipeline=2)]
    if name == "mixtral":
        splits.append(Sharding(tensor=2, expert=2))
    library = cpu_library(CPU, DTYPE)
    has_panels = library is not None and bool(library.stoker_has_panels())
    for split in splits:
        for stage in range(split.pipeline):
            taken, counted = adapter_on(tmp_path, adapter, split, stage)
            assert taken == counted if name in EXACT and has_panels else 0 < taken <= counted, split


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_adapters_of_quantized_models_have_the_same_size(quantization: str, tmp_path: Path) -> None:
    theirs = tiny_family("llama")
    theirs.save_pretrained(tmp_path)
    adapter = PeftAdapters(theirs).save_adapter(tmp_path / "adapters", r=16)
    taken, counted = adapter_on(tmp_path, adapter, Sharding(), 0, quantization=quantization)
    assert (taken, counted) == adapter_on(tmp_path, adapter, Sharding(), 0)
    assert taken <= counted


def test_ranks_that_share_a_kv_head_each_hold_its_adapter(tmp_path: Path) -> None:
    theirs = tiny_family("llama")
    assert theirs.config.num_key_value_heads == 2
    theirs.save_pretrained(tmp_path)
    adapter = PeftAdapters(theirs).save_adapter(tmp_path / "adapters", r=16)
    taken, counted = adapter_on(tmp_path, adapter, Sharding(tensor=4), 0)
    assert 0 < taken <= counted
    assert counted > adapter_on(tmp_path, adapter, Sharding(), 0)[1] / 4


def packed_by(loaded: LoadedAdapters, adapter: Path) -> dict[tuple[str, ...], list[tuple[bytes, tuple[int, ...]]]]:
    """Load an adapter and return, by site, the bytes of its packed matrices and their other fields."""
    loaded.load(AdapterSource(0, "adapter", str(adapter)))
    found = {}
    for key, factors in loaded._loaded[0].items():
        native = factors.native
        if native is None:
            found[key] = [(part.a.float().numpy().tobytes() + part.b.float().numpy().tobytes(), (part.first_output,))
                          for part in factors.parts]  # fmt: skip
            continue
        parts = native.factors.parts[: native.factors.num_parts]
        matrices = [
            (native.factors.a, ()),
            *((part.b, (part.first_rank, part.first_output, part.outputs)) for part in parts),
        ]
        found[key] = [
            (
                ctypes.string_at(each.w, each.outputs * each.inner * 2),
                (each.outputs, each.inner, each.is_panels, *fields),
            )
            for each, fields in matrices
        ]
    return found


@pytest.mark.parametrize("alpha", [16, 24])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["llama", "gptj", "phi3", "gpt2", "mixtral", "deepseek_v3"])
def test_adapters_of_one_layout_are_packed_like_the_first(
    name: str, stored: torch.dtype, alpha: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later adapters have the same bytes as if they were loaded first, and their own errors."""
    theirs = tiny_family(name) if name in FAMILIES else tiny_mixture(name)
    theirs.save_pretrained(tmp_path)
    adapters, folders, is_native = PeftAdapters(theirs), [], name in ("llama", "gptj", "phi3")
    targets = {"target_modules": "all-linear"} if is_native else {}  # otherwise the embedding, too
    for number in range(3):
        folders.append(adapters.save_adapter(tmp_path / f"adapter{number}", r=16, lora_alpha=alpha, **targets))
        path = folders[-1] / "adapter_model.safetensors"
        save_file({key: tensor.to(stored) for key, tensor in load_file(path).items()}, path)
    args, split = args_of(tmp_path), Sharding()
    checkpoint = find_checkpoint(args)
    loaded = adapters_of(args, checkpoint, split, 0)
    first = packed_by(loaded, folders[0])
    for folder in (folders[1], folders[0], folders[2]):
        expected = packed_by(adapters_of(args, checkpoint, split, 0), folder)
        with monkeypatch.context() as patch:
            if loaded._layouts:  # a known layout needs no parsing
                patch.setattr(loaded._reader, "adapter", None)
            assert packed_by(loaded, folder) == expected
        assert (expected == first) == (folder == folders[0])
    if cpu_library(CPU, DTYPE) is not None:
        assert bool(loaded._layouts) == (stored == DTYPE and is_native)
    tensors = load_file(folders[2] / "adapter_model.safetensors")
    tensors[sorted(tensors)[5]].view(-1)[3] = float("nan")
    save_file(tensors, folders[2] / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="hold nan or infinity"):
        packed_by(loaded, folders[2])
    assert packed_by(loaded, folders[0]) == first
