"""The guard detects reads of memory that does not belong to the sequence."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stoker_engine import LLM, SamplingParams
from stoker_engine.sizing.cache_groups import NULL_BLOCK

from ...support.engine.guarded_cache import GuardedBlocks, GuardedKVCachePool, Snapshot

PROMPT = list(range(2, 102))  # past tiny Gemma's window of 24
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def killed_by(act: Callable[[], object]) -> int | None:
    """Return the signal that ends a process which calls `act`."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # without faulthandler: the death is expected
        act()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None


@pytest.mark.parametrize("block_bytes", [4096, 3 * 4096, 10_000])
def test_a_stray_read_ends_the_process(block_bytes: int) -> None:
    blocks = GuardedBlocks(8, block_bytes)
    blocks.allow([2, 3])
    assert blocks.tensor[3].view(torch.float32).isnan().all()
    blocks.tensor[2:4] = 1
    blocks.forbid([3])
    whole = blocks.tensor.flatten()
    before = torch.as_strided(whole, (1,), (1,), whole.storage_offset() - block_bytes)
    after = torch.as_strided(whole, (1,), (1,), whole.storage_offset() + 8 * block_bytes + 4096)
    inside = [blocks.tensor[number] for number in (0, 5, 7)]
    for stray in (before, after, *inside):
        assert killed_by(lambda stray=stray: int(stray.sum())) == signal.SIGSEGV  # type: ignore[misc]
    assert killed_by(lambda: int(blocks.tensor[2].sum())) is None


def test_free_blocks_are_forbidden_and_cached_blocks_restored(tiny_gemma3: Path) -> None:
    llm = LLM(str(tiny_gemma3), num_gpu_blocks_override=64, max_model_len=160, max_num_batched_tokens=32)
    engine = llm.engine
    pool = engine.executor.runner.pool  # type: ignore[attr-defined]
    assert isinstance(pool, GuardedKVCachePool)
    [first] = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    pool.launched.append(Snapshot.take(engine))
    with torch.inference_mode():
        pool.copy([])  # blocks released by the last step change owners before the next
    assert not pool._held and pool._cached_contents
    assert not any(pool._blocks._held)
    [again] = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 96
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize("wrong", ["the null block", "a free block", "another's block"])
def test_a_wrong_block_in_a_table_is_noticed(wrong: str, tiny_gemma3: Path) -> None:
    llm = LLM(str(tiny_gemma3), num_gpu_blocks_override=256, max_model_len=160, max_num_batched_tokens=32)
    engine = llm.engine
    for name, prompt in (("a", PROMPT), ("b", PROMPT[::-1])):
        engine.add(llm._inputs.request(name, prompt, GREEDY))
    for _ in range(5):
        engine.step()
    one, other = (engine.scheduler.requests[name].live[0] for name in "ab")
    free = next(b for b in range(1, 256) if engine.scheduler.kv.pool.is_free(b))
    blocks = {"the null block": NULL_BLOCK, "a free block": free, "another's block": other.blocks[1][-1]}
    rows = engine.executor.runner.batch  # type: ignore[attr-defined]
    rows.tables[1, one.row, len(one.blocks[1]) - 1] = blocks[wrong]
    with pytest.raises(AssertionError):
        engine.step()
