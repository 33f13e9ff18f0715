"""An adapter takes the memory that the planner counts if its files have one A per matrix, otherwise less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stoker_engine.attention.select import attention_backend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.adapter import AdapterSource
from stoker_engine.kernels.cpu.library import cpu_library
from stoker_engine.kernels.select import select_kernels
from stoker_engine.layers.batch_rows import BatchRows
from stoker_engine.layers.build import Build
from stoker_engine.lora.adapter_reader import adapter_reader
from stoker_engine.lora.loaded_adapters import LoadedAdapters
from stoker_engine.models.checkpoint import find_checkpoint
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


def adapter_on(folder: Path, adapter: Path, split: Sharding, stage: int, **options: Any) -> tuple[int, int]:
    """Return an adapter's bytes on the first rank of a stage, and the counted bytes."""
    args = EngineArgs(str(folder), dtype="bfloat16", device="cpu", enable_lora=True, max_lora_rank=64, **options)
    checkpoint, rows = find_checkpoint(args), BatchRows()
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
    found = loaded.load(AdapterSource(0, "adapter", str(adapter)))
    formats = checkpoint.weight_formats(DTYPE, CPU)
    return found.num_bytes, adapter_bytes(checkpoint.config, found.rank, DTYPE.itemsize, split, formats)[stage]


@pytest.mark.parametrize("rank", [16, 8])
@pytest.mark.parametrize("name", [*EXACT, "phi3", "gpt2", "mixtral", "qwen2_moe", "deepseek_v3"])
def test_an_adapter_takes_what_is_counted(name: str, rank: int, tmp_path: Path) -> None:
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
def test_quantized_models_have_the_same_adapters(quantization: str, tmp_path: Path) -> None:
    theirs = tiny_family("llama")
    theirs.save_pretrained(tmp_path)
    adapter = PeftAdapters(theirs).save_adapter(tmp_path / "adapters", r=16)
    taken, counted = adapter_on(tmp_path, adapter, Sharding(), 0, quantization=quantization)
    assert (taken, counted) == adapter_on(tmp_path, adapter, Sharding(), 0)
    assert taken <= counted


def test_ranks_that_share_a_key_and_value_head_each_have_its_adapter(tmp_path: Path) -> None:
    theirs = tiny_family("llama")
    assert theirs.config.num_key_value_heads == 2
    theirs.save_pretrained(tmp_path)
    adapter = PeftAdapters(theirs).save_adapter(tmp_path / "adapters", r=16)
    taken, counted = adapter_on(tmp_path, adapter, Sharding(tensor=4), 0)
    assert 0 < taken <= counted
    assert counted > adapter_on(tmp_path, adapter, Sharding(), 0)[1] / 4
