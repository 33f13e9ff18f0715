"""Every family with adapters, in one batch with and without them, compared with PEFT's unmerged model in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stoker_engine.attention.backend import AttentionBackend
from stoker_engine.attention.select import attention_backend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.adapter import AdapterSource
from stoker_engine.kernels.bundle import Kernels
from stoker_engine.kernels.cpu.library import cpu_library, library
from stoker_engine.kernels.select import select_kernels
from stoker_engine.layers.batch_rows import BatchRows
from stoker_engine.layers.build import Build
from stoker_engine.lora.adapter_reader import adapter_reader
from stoker_engine.lora.loaded_adapters import LoadedAdapters
from stoker_engine.lora.slot_stacks import grouped_adapters
from stoker_engine.models.checkpoint import find_checkpoint

from ...support.engine.peft_adapters import PeftAdapters
from ...support.engine.served import served
from ...support.engine.tiny_configs import FAMILIES, MIXTURES
from ...support.engine.tiny_models import prompts, tiny_family, tiny_mixture
from ..models.conftest import PagedRun, assert_run_is

CPU = torch.device("cpu")
#: Slots of the sequences' adapters, and the adapter in each slot: their numbers differ.
SLOTS, HELD = [0, 2, -1, 2], {0: 1, 2: 0}


class WithAdapters:
    """A family's model with two PEFT adapters, and the engine's model.

    Args:
        options: options of the engine.
        kernels, backend: kernels and backend to use; None for the CPU's.

    Attributes:
        adapters: PEFT's adapters, with transformers' model.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        kernels: Kernels | None = None,
        backend: AttentionBackend | None = None,
        **options: Any,
    ) -> None:
        theirs = tiny_family(name) if name in FAMILIES else tiny_mixture(name)
        theirs.save_pretrained(folder)
        self.adapters, self._dtype, self._rows = PeftAdapters(theirs), dtype, BatchRows()
        folders = [
            self.adapters.save_adapter(folder / "adapters", r=5, lora_alpha=7, use_rslora=True),
            self.adapters.save_adapter(folder / "adapters", r=16, lora_alpha=16),
        ]
        options = {"max_loras": 3, "max_lora_rank": 64, **options}
        args = EngineArgs(str(folder), dtype="float32", device="cpu", enable_lora=True, **options)
        checkpoint, library = find_checkpoint(args), cpu_library(CPU, dtype) if kernels is None else None
        grouped = None if kernels is None else grouped_adapters(args, checkpoint.config, kernels)
        reader = adapter_reader(checkpoint, args, dtype)
        self._loaded = LoadedAdapters(reader, dtype, args.max_loras, CPU, library, grouped)
        backend, kernels = backend or attention_backend(CPU, served(dtype)), kernels or select_kernels(CPU, dtype)
        build = Build(dtype, backend, kernels, rows=self._rows)
        self._model = checkpoint.load(replace(build, extend=self._loaded.extend), CPU, 256)
        self._rows.adapters = torch.full((len(SLOTS) + 1,), -1)
        self._loaded.settle(self._rows)
        for number, each in enumerate(folders):
            self._loaded.load(AdapterSource(number, f"adapter {number}", str(each)))
        for slot, number in HELD.items():
            self._loaded.activate(slot, number)

    def run(self, prompts: list[list[int]], slots: list[int], seed: int = 0, new_tokens: int = 12) -> PagedRun:
        """Run these prompts together, each with the adapter in its slot."""
        self._rows.adapters[: len(slots)] = torch.tensor(slots)
        return PagedRun(self._model, prompts, new_tokens=new_tokens, seed=seed, dtype=self._dtype, rows=self._rows)

    def check(self, slots: list[int], prompts: list[list[int]], run: PagedRun) -> None:
        """Assert that each sequence equals PEFT's with its adapter, and differs from the base model's."""
        base = self.adapters.reference(-1)
        for slot, sequence, prompt in zip(slots, run.sequences, prompts, strict=True):
            reference = self.adapters.reference(HELD.get(slot, -1))
            assert_run_is(SimpleNamespace(prompts=[prompt], sequences=[sequence]), reference)
            if slot >= 0:
                assert (reference(prompt) - base(prompt)).abs().max() > 0.01

    def drop(self, number: int) -> None:
        """Drop an adapter."""
        self._loaded.drop(number)


@pytest.mark.parametrize("name", [*FAMILIES, *MIXTURES])
def test_a_mixed_batch_equals_peft(name: str, tmp_path: Path) -> None:
    model = WithAdapters(name, tmp_path)
    model.check(SLOTS, prompts(), model.run(prompts(), SLOTS))


@pytest.mark.skipif(library() is None, reason="without the CPU's kernels a row's result depends on its batch")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gemma3", "gpt2", "mixtral", "gpt_oss", "dbrx", "deepseek_v3"])
def test_sequence_has_the_same_bits_alone_and_beside_other_adapters(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The first sequence has the second adapter; the other adapter is dropped."""
    model = WithAdapters(name, tmp_path, dtype)
    together = model.run(prompts(), SLOTS)
    model.drop(HELD[2])
    alone = model.run(prompts()[:1], SLOTS[:1], seed=1)
    assert torch.equal(torch.stack(alone.sequences[0].logits), torch.stack(together.sequences[0].logits))
    without = model.run(prompts()[2:3], SLOTS[2:3], seed=2)
    assert torch.equal(torch.stack(without.sequences[0].logits), torch.stack(together.sequences[2].logits))
