"""Every family with adapters, in one batch with and without them, against PEFT's unmerged model in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

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

from ...support.engine.peft_adapters import PeftAdapters
from ...support.engine.served import served
from ...support.engine.tiny_configs import FAMILIES, MIXTURES
from ...support.engine.tiny_models import prompts, tiny_family, tiny_mixture
from ..models.conftest import PagedRun, assert_run_is

CPU = torch.device("cpu")
#: The slots that the sequences' adapters are in, and which adapter is there: a slot is another number than an adapter.
SLOTS, HELD = [0, 2, -1, 2], {0: 1, 2: 0}


@pytest.mark.parametrize("name", [*FAMILIES, *MIXTURES])
def test_a_mixed_batch_equals_peft(name: str, tmp_path: Path) -> None:
    theirs = tiny_family(name) if name in FAMILIES else tiny_mixture(name)
    theirs.save_pretrained(tmp_path)
    adapters = PeftAdapters(theirs)
    folders = [
        adapters.save_adapter(tmp_path / "adapters", r=5, lora_alpha=7, use_rslora=True),
        adapters.save_adapter(tmp_path / "adapters", r=16, lora_alpha=16),
    ]
    args = EngineArgs(str(tmp_path), dtype="float32", device="cpu", enable_lora=True, max_loras=3, max_lora_rank=64)
    checkpoint = find_checkpoint(args)
    dtype, rows = torch.float32, BatchRows()
    loaded = LoadedAdapters(
        adapter_reader(checkpoint, args, dtype), dtype, args.max_loras, CPU, cpu_library(CPU, dtype)
    )
    build = Build(dtype, attention_backend(CPU, served(dtype)), select_kernels(CPU, dtype), rows=rows)
    model = checkpoint.load(replace(build, extend=loaded.extend), CPU, 256)
    rows.adapters = torch.tensor([*SLOTS, -1])
    loaded.settle(rows)
    for number, folder in enumerate(folders):
        loaded.load(AdapterSource(number, f"adapter {number}", str(folder)))
    for slot, number in HELD.items():
        loaded.activate(slot, number)
    run = PagedRun(model, prompts(), new_tokens=12, rows=rows)
    base = adapters.reference(-1)
    for slot, sequence, prompt in zip(SLOTS, run.sequences, prompts(), strict=True):
        reference = adapters.reference(HELD.get(slot, -1))
        assert_run_is(SimpleNamespace(prompts=[prompt], sequences=[sequence]), reference)
        if slot >= 0:
            assert (reference(prompt) - base(prompt)).abs().max() > 0.01
