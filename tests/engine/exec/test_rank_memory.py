"""Each process of a shared model takes the memory of its shard, not that of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.engine import Engine
from stoker_engine.exec.rank_executor import RankExecutor
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.parallel.layout import RankLayout
from stoker_engine.sizing.weight_sizes import stage_weight_bytes

_MIB = 1024**2
#: Variation of a process's memory besides its weights, in bytes: freed but not returned memory.
_SLACK = 24 * _MIB


def _llama(folder: Path, layers: int) -> Path:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 128}
    sizes = {"vocab_size": 1001, "hidden_size": 512, "intermediate_size": 2001, "num_hidden_layers": layers}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    return folder


def _anonymous(pid: int) -> int:
    """Return the bytes of anonymous memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def _of_each_rank(args: EngineArgs) -> list[int]:
    engine = Engine.from_args(args)
    try:
        assert isinstance(engine.executor, RankExecutor)
        children = {child.pid for child in psutil.Process().children(recursive=True)}
        pids = [rank.pid for rank in engine.executor._ranks]  # type: ignore[attr-defined]
        assert children.issuperset(pids)
        return [_anonymous(pid) for pid in pids]
    finally:
        engine.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    ],
    ids=str,
)
def test_each_process_takes_the_memory_of_its_shard(sizes: dict[str, Any], tmp_path: Path) -> None:
    """Besides the memory of a process with almost no weights."""
    taken, planned = [], []
    for layers in (2, 14):
        model = _llama(tmp_path / f"{layers}", layers)
        args = EngineArgs(str(model), dtype="float32", device="cpu", num_gpu_blocks_override=16, **sizes)
        layout, config = RankLayout.of(args), find_checkpoint(args).config
        taken.append(_of_each_rank(args))
        planned.append(
            [
                stage_weight_bytes(config, layout.stage_of(rank).index, 4, layout.sharding, rank=layout.place_of(rank))
                for rank in range(layout.size)
            ]
        )
    for few, many, share, larger in zip(*taken, *planned, strict=True):
        assert larger - share > 1.5 * _SLACK, "the difference must exceed the variation"
        assert abs((many - few) - (larger - share)) < _SLACK
