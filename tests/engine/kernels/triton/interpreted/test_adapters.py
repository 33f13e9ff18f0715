"""Models with adapters by Triton's kernels, compared with PEFT's unmerged models, and bitwise between batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.attention.triton import TritonBackend
from stoker_engine.kernels.triton.batch_invariant import BATCH_INVARIANT
from stoker_engine.kernels.triton.bundle import TRITON

from ....lora.test_families import HELD, WithAdapters

SLOTS = [0, 2, -1]
PROMPTS = [[5, 17, 99, 3, 64, 2, 31, 8, 8, 90, 11, 27, 33, 4, 5, 6, 7, 61, 19], [8], [21, 7, 9]]
slow = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        "gemma3",  # tied head
        pytest.param("phi3", marks=slow),  # one A for several matrices
        pytest.param("gpt2", marks=slow),
        pytest.param("mixtral", marks=slow),
        pytest.param("gpt_oss", marks=slow),  # stacked experts have adapters of their own
        "deepseek_v3",  # absorbed matrices
    ],
)
def test_a_mixed_batch_equals_peft(name: str, tmp_path: Path) -> None:
    model = WithAdapters(name, tmp_path, kernels=TRITON, backend=SdpaBackend(), max_lora_rank=33)
    model.check(SLOTS, PROMPTS, model.run(PROMPTS, SLOTS, new_tokens=3))
    model.drop(HELD[2])
    model.check([0, -1, -1], PROMPTS, model.run(PROMPTS, SLOTS, new_tokens=2, seed=1))


@pytest.mark.usefixtures("batch_invariant_matmul")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("gemma3", torch.float32),
        pytest.param("gemma3", torch.bfloat16, marks=slow),
        pytest.param("mixtral", torch.float32, marks=slow),
        pytest.param("deepseek_v3", torch.float32, marks=slow),
    ],
    ids=str,
)
def test_sequence_has_the_same_bits_alone_and_beside_other_adapters(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    backend = TritonBackend(batch_invariant=True)
    model = WithAdapters(name, tmp_path, dtype, BATCH_INVARIANT, backend, max_lora_rank=32, batch_invariant=True)
    together = model.run(PROMPTS, SLOTS, new_tokens=3)
    model.drop(HELD[2])
    for index in (0, 2):
        one = slice(index, index + 1)
        alone = model.run(PROMPTS[one], SLOTS[one], seed=index + 1, new_tokens=3)
        found, expected = (torch.stack(run.sequences[at].logits) for run, at in ((alone, 0), (together, index)))
        assert torch.equal(found, expected)
