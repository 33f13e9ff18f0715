"""A KV cache that detects stray reads.

    │ no access │ null block │ block 1 │ block 2 │ …          │ no access │
                  nan          a sequence's         free
                  no access    nan where unwritten  nan, no access

Memory that must not be read is NaN, so that a read changes results even if it is masked. Pages that lie entirely in
such blocks are inaccessible: a read ends the process, and faulthandler prints where. A free block whose content the
prefix cache still offers is NaN too: its content is saved, and restored when a sequence takes it over.

`guard` installs it in all engines: integrity is checked after each step, and the block tables of each step are compared
with the owners that the scheduler and the pool had at its launch (`Snapshot`), since a step may run later.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from stoker_engine import engine as engine_module
from stoker_engine.core.step import Step
from stoker_engine.engine import Engine
from stoker_engine.exec import build_runner, kv_cache
from stoker_engine.exec.executor import LocalExecutor
from stoker_engine.exec.inputs import InputBuilder, Inputs
from stoker_engine.exec.kv_cache import KVCachePool
from stoker_engine.sched import kv_manager
from stoker_engine.sched.block_pool import BlockPool
from stoker_engine.sizing.cache_groups import NULL_BLOCK
from stoker_engine.sizing.step_shapes import StepShape

from .thread_ranks import ThreadExecutor

_PAGE = mmap.PAGESIZE
#: Bytes on each side; many blocks, since a wrong block number misses by whole blocks.
_GUARD = 1 << 24
#: Byte that makes NaN in every dtype.
_NAN = 0xFF

_libc = ctypes.CDLL(None, use_errno=True)
_patching = threading.Lock()


class GuardedBlocks:
    """Memory of blocks, initially NaN; only blocks passed to `allow` are accessible.

    Attributes:
        tensor: uint8 [blocks, bytes per block].
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        pages = -(-num_blocks * block_bytes // _PAGE)
        memory = mmap.mmap(-1, 2 * _GUARD + pages * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._protect(whole, readable=False)
        self._pages = whole[_GUARD:-_GUARD].view(pages, _PAGE)
        self._held = [0] * pages  # number of accessible blocks in each page
        self._filled = [False] * pages  # with NaN, as late as possible: most of a large cache is never used
        self._block_bytes = block_bytes
        self.tensor = whole[_GUARD : _GUARD + num_blocks * block_bytes].view(num_blocks, block_bytes)

    def allow(self, blocks: Iterable[int]) -> None:
        """Make the pages of `blocks` accessible; the blocks must be inaccessible."""
        opened = []
        for page in self._pages_of(blocks):
            self._held[page] += 1
            if self._held[page] == 1:
                opened.append(page)
        self._protect_pages(opened, readable=True)
        for page in opened:
            if not self._filled[page]:
                self._filled[page] = True
                self._pages[page].fill_(_NAN)

    def forbid(self, blocks: Iterable[int]) -> None:
        """Fill accessible `blocks` with NaN, and protect pages without another accessible block."""
        blocks = list(blocks)
        for block in blocks:
            self.tensor[block].fill_(_NAN)
        closed = []
        for page in self._pages_of(blocks):
            self._held[page] -= 1
            if self._held[page] == 0:
                closed.append(page)
        self._protect_pages(closed, readable=False)

    def _pages_of(self, blocks: Iterable[int]) -> Iterable[int]:
        size = self._block_bytes
        return (page for b in blocks for page in range(b * size // _PAGE, ((b + 1) * size - 1) // _PAGE + 1))

    def _protect_pages(self, pages: list[int], readable: bool) -> None:
        # One call per run of neighbours: page - index is constant within a run.
        for _, run in itertools.groupby(enumerate(sorted(pages)), lambda indexed: indexed[1] - indexed[0]):
            numbers = [page for _, page in run]
            self._protect(self._pages[numbers[0] : numbers[-1] + 1], readable)

    @staticmethod
    def _protect(pages: torch.Tensor, readable: bool) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE if readable else 0
        if _libc.mprotect(ctypes.c_void_p(pages.data_ptr()), ctypes.c_size_t(pages.numel()), access) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")


class WatchedBlockPool(BlockPool):
    """Block pool that records changes of ownership.

    Attributes:
        fresh: blocks allocated since `forget_changes`; their content is undefined.
        changed: all blocks allocated, taken over or released since then.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] = lambda block: None) -> None:
        super().__init__(num_blocks, on_evict)
        self.fresh: set[int] = set()
        self.changed: set[int] = set()

    def allocate(self, count: int) -> list[int]:
        blocks = super().allocate(count)
        self.fresh.update(blocks)
        self.changed.update(blocks)
        return blocks

    def acquire(self, block: int) -> None:
        super().acquire(block)
        self.changed.add(block)

    def release(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        super().release(blocks)
        self.changed.update(blocks)

    def forget_changes(self) -> None:
        self.fresh.clear()
        self.changed.clear()


@dataclass(frozen=True)
class Snapshot:
    """State of the scheduler at the launch of a step.

    Attributes:
        refs: number of sequences that refer to each block.
        changed, fresh: see `WatchedBlockPool`, since the previous snapshot.
        cached: blocks in `changed` whose content the prefix cache offers.
        tables: block tables of all running sequences, by row.
        windows: window of each group.
    """

    refs: list[int]
    changed: set[int]
    fresh: set[int]
    cached: set[int]
    tables: dict[int, list[list[int]]]
    windows: list[int | None]

    @classmethod
    def take(cls, engine: Engine) -> Snapshot:
        kv = engine.scheduler.kv
        pool = kv.pool
        assert isinstance(pool, WatchedBlockPool)
        changed, fresh = set(pool.changed), set(pool.fresh)
        pool.forget_changes()
        tables = {s.row: [list(table) for table in s.blocks] for s in engine.scheduler.running}
        return cls(list(pool._refs), changed, fresh, changed & kv.prefix_cache._key_of.keys(), tables, kv.windows)


class GuardedKVCachePool(KVCachePool):
    """The cache's memory, in which blocks are accessible while a sequence holds them.

    Attributes:
        launched: snapshots of steps that were launched and have not run; the engine adds them.
        running: snapshot of the current step.
    """

    running: Snapshot

    def __init__(self, *args: Any, **options: Any) -> None:
        self.launched: deque[Snapshot] = deque()
        self._held: set[int] = set()
        self._cached_contents: dict[int, torch.Tensor] = {}  # contents of free blocks for the prefix cache
        # Thread ranks create theirs concurrently: overlapping patches would leave one behind.
        with _patching, pytest.MonkeyPatch.context() as patched:
            patched.setattr(kv_cache, "allocate", self._allocate)
            super().__init__(*args, **options)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Change the blocks' ownership as the step's schedule did, then copy."""
        self.running = now = self.launched.popleft()
        blocks = self._blocks
        held = {block for block in now.changed if now.refs[block]}
        sources = [blocks.tensor[source].clone() for source, _ in copies]  # a source may have been released since
        for block in now.changed & self._held - held:
            if block in now.cached and block not in now.fresh:
                self._cached_contents[block] = blocks.tensor[block].clone()
        blocks.forbid(now.changed & self._held - held)
        blocks.allow(held - self._held)
        for block in now.fresh:
            self._cached_contents.pop(block, None)
            if block in held:
                blocks.tensor[block].fill_(_NAN)
        for block in held - self._held - now.fresh:
            blocks.tensor[block] = self._cached_contents.pop(block)
        self._held = self._held - now.changed | held
        for content, (_, target) in zip(sources, copies, strict=True):
            blocks.tensor[target] = content

    def _allocate(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        assert device.type == "cpu", "a GPU's memory cannot be guarded"
        self._blocks = GuardedBlocks(*shape)
        return self._blocks.tensor


@dataclass(frozen=True)
class CheckedInputBuilder(InputBuilder):
    """`InputBuilder` that checks its inputs.

    Attributes:
        pool: the runner's cache.
    """

    pool: GuardedKVCachePool

    def build(self, step: Step, shape: StepShape | None = None) -> Inputs:
        """See `InputBuilder`."""
        inputs = super().build(step, shape)
        check_tables(self.pool.running, step, inputs, self.block_size)
        return inputs


def check_tables(now: Snapshot, step: Step, inputs: Inputs, block_size: int) -> None:
    """Assert that a step's block tables contain only its sequences' blocks and the null block, and that each slot is
    written by one token, into a block that is held.
    """
    for group, (blocks, window) in enumerate(zip(inputs.metadata.groups, now.windows, strict=True)):
        count, tables = len(step.rows), blocks.tables.tolist()
        assert not any(itertools.chain(*tables[count:])), "block tables beyond the sequences are not empty"
        batch = zip(tables[:count], step.rows, step.starts, step.lengths, strict=True)
        for table, row, start, length in batch:
            blocks_of_row = now.tables[row][group]
            assert table == (blocks_of_row + [NULL_BLOCK] * len(table))[: len(table)]
            first = 0 if window is None else max(0, start + 1 - window) // block_size
            assert NULL_BLOCK not in blocks_of_row[first : -(-(start + length) // block_size)]
            assert all(block == NULL_BLOCK or now.refs[block] for block in blocks_of_row)
        slots = blocks.slot_mapping.tolist()
        assert set(slots[step.num_tokens :]) <= {-1}
        slots = slots[: step.num_tokens]
        assert len(set(slots)) == len(slots) == step.num_tokens
        assert all(now.refs[slot // block_size] for slot in slots)


def guard(patched: pytest.MonkeyPatch) -> None:
    """Install guarded caches and integrity checks in all engines that this process creates from now on."""
    init, step = Engine.__init__, Engine.step

    def guarded_init(engine: Engine, *args: Any, **options: Any) -> None:
        init(engine, *args, **options)
        executor = engine.executor
        if isinstance(executor, LocalExecutor):
            runners = [executor.runner]
        elif isinstance(executor, ThreadExecutor):
            runners = executor.runners
        else:  # the caches are in other processes
            return
        pools = [each.pool for each in runners]
        launch = executor.launch

        def watched_launch(step: Step) -> None:
            snapshot = Snapshot.take(engine)
            for pool in pools:
                assert isinstance(pool, GuardedKVCachePool)
                pool.launched.append(snapshot)
            launch(step)

        executor.launch = watched_launch  # type: ignore[method-assign]
        for each in runners:
            assert isinstance(each.pool, GuardedKVCachePool)
            each.inputs = CheckedInputBuilder(**vars(each.inputs), pool=each.pool)

    def checked_step(engine: Engine) -> Any:
        outputs = step(engine)
        engine.scheduler.check()
        return outputs

    patched.setattr(build_runner, "KVCachePool", GuardedKVCachePool)
    patched.setattr(kv_manager, "BlockPool", WatchedBlockPool)
    patched.setattr(engine_module.Engine, "__init__", guarded_init)
    patched.setattr(engine_module.Engine, "step", checked_step)
