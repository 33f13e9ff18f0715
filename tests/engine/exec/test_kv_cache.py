"""Memory of the pool: a block's layers are adjacent, and groups overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from stoker_common.errors import OutOfMemoryError
from stoker_engine.architectures.cache_spec import CacheSpec
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.contract.argv import human_int
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.exec.kv_cache import KVCachePlan, KVCachePool, plan_kv_cache
from stoker_engine.parallel.communicator import SingleRank
from stoker_engine.parallel.rank_groups import RankGroups
from stoker_engine.sizing.cache_groups import cache_groups
from stoker_engine.sizing.kv_format import kv_format
from stoker_engine.sizing.memory import Device, Numbers, memory_use
from stoker_engine.sizing.weight_sizes import Sharding

SPECS = [
    CacheSpec(2, 8, 8),
    CacheSpec(2, 8, 8, sliding_window=32),
    CacheSpec(1, 16, 4, sliding_window=32),
    CacheSpec(1, 24, 16, latent=True),
]


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def pool(request: pytest.FixtureRequest) -> KVCachePool:
    kv = kv_format("auto", str(request.param))
    groups = cache_groups(SPECS, 4, kv)
    assert [group.layers for group in groups] == [(0, 3), (1, 2)]
    plan = KVCachePlan(kv, groups, num_blocks=6, block_size=4, max_model_len=16, step_tokens=16, max_num_seqs=4)
    return KVCachePool(plan, SPECS, request.param, torch.device("cpu"))


def test_views_have_their_layers_shapes(pool: KVCachePool) -> None:
    assert [tuple(cache.key.shape) for cache in pool.caches] == [
        (6, 4, 2, 8),
        (6, 4, 2, 8),
        (6, 4, 1, 16),
        (6, 4, 1, 24),
    ]
    assert [cache.value.shape[-1] for cache in pool.caches] == [8, 8, 4, 16]
    assert [cache.group for cache in pool.caches] == [0, 1, 1, 0]


def test_layers_of_one_group_never_overlap_and_a_latents_values_are_its_keys(pool: KVCachePool) -> None:
    for group in (0, 1):
        caches = [cache for cache in pool.caches if cache.group == group]
        for number, cache in enumerate(caches):
            cache.key.fill_(number * 2 + 1)
            if cache.value.data_ptr() != cache.key.data_ptr():
                cache.value.fill_(number * 2 + 2)
        for number, cache in enumerate(caches):
            assert (cache.key == number * 2 + 1).all()
            latent = cache.value.data_ptr() == cache.key.data_ptr()
            assert (cache.value == number * 2 + (1 if latent else 2)).all()


def test_copies_read_all_before_any_is_written(pool: KVCachePool) -> None:
    key = pool.caches[0].key
    for block in range(6):
        key[block].fill_(block)
    pool.copy([(0, 1), (1, 2), (5, 0)])
    assert [float(key[block].flatten()[0]) for block in range(6)] == [5, 0, 1, 3, 4, 5]


TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize("blocks", [0, 1, 2, 9])
def test_a_too_small_cache_is_refused_with_a_useful_remedy(blocks: int) -> None:
    block = 2 * 2 * 4 * 8 * 16 * 4
    args = EngineArgs("tiny", max_model_len=256, kv_cache_memory_bytes=blocks * block or 1, block_size=16)
    with pytest.raises(OutOfMemoryError, match="--kv-cache-memory-bytes") as refused:
        plan_kv_cache(args, ModelConfig.from_dict(TINY), torch.float32, torch.device("cpu"))
    shorter = f"lower --max-model-len to {16 * (blocks - 1)}"
    assert (shorter in str(refused.value)) == (blocks > 1), "a useless length is not suggested"
    assert ("--max-model-len to" in str(refused.value)) == (blocks > 1)


def test_a_too_small_number_of_blocks_is_refused_with_its_flag() -> None:
    for blocks in (1, 2):
        args = EngineArgs("tiny", max_model_len=256, num_gpu_blocks_override=blocks)
        with pytest.raises(OutOfMemoryError, match="raise --num-gpu-blocks-override"):
            plan_kv_cache(args, ModelConfig.from_dict(TINY), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_cache_that_exceeds_the_memory_is_refused_with_the_largest_size(
    tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker_engine.parallel.device.host_memory", lambda: 8 << 30)
    config, cpu = ModelConfig.from_dict(TINY), torch.device("cpu")
    args = EngineArgs("tiny", tensor_parallel_size=tensor)

    def refusal(**size: int) -> str:
        with pytest.raises(OutOfMemoryError, match=r"a KV cache of .* does not fit: .* of memory also hold") as refused:
            plan_kv_cache(replace(args, **size), config, torch.float32, cpu)  # type: ignore[arg-type]
        return str(refused.value)

    largest = human_int(refusal(kv_cache_memory_bytes=900 << 30).rpartition(" ")[2])
    num_blocks = int(refusal(num_gpu_blocks_override=1 << 40).rpartition(" ")[2])
    assert 0.99 * (8 << 30) < tensor * largest < 8 << 30
    plan = plan_kv_cache(replace(args, kv_cache_memory_bytes=largest), config, torch.float32, cpu)
    fixed = replace(args, num_gpu_blocks_override=num_blocks)
    assert plan_kv_cache(fixed, config, torch.float32, cpu).num_blocks == num_blocks
    assert 0 <= num_blocks - plan.num_blocks <= (1 << 20) // (2 * 2 * 4 * 8 * 16 * 4 // tensor) + 1
    assert "--kv-cache-memory-bytes" in refusal(kv_cache_memory_bytes=largest + (1 << 20))
    assert "--num-gpu-blocks-override" in refusal(num_gpu_blocks_override=num_blocks + 1)


@pytest.mark.parametrize("dtype, smaller", [(torch.float32, True), (torch.bfloat16, False), (torch.float16, False)])
def test_a_model_that_does_not_fit_is_refused_with_a_useful_remedy(dtype: torch.dtype, smaller: bool) -> None:
    args = EngineArgs("tiny", gpu_memory_utilization=1e-9)
    with pytest.raises(OutOfMemoryError, match=r"\+ a block of the KV cache; provide more") as refused:
        plan_kv_cache(args, ModelConfig.from_dict(TINY), dtype, torch.device("cpu"))
    assert ("set --dtype bfloat16" in str(refused.value)) == smaller


class _UnequalRanks(SingleRank):
    """Another rank has room for 7 blocks fewer than this one."""

    size = 2

    def all_gather(self, x: torch.Tensor, widths: Sequence[int] | None = None) -> torch.Tensor:
        return torch.cat((x, x - 7))


@pytest.mark.parametrize("tensor, engines, nodes", [(2, 1, 1), (2, 1, 2), (2, 3, 1), (2, 3, 2), (1, 4, 2), (4, 2, 8)])
def test_ranks_share_the_memory_of_their_own_machine(
    tensor: int, engines: int, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker_engine.parallel.device.host_memory", lambda: 8 << 30)
    config = ModelConfig.from_dict(TINY)
    args = EngineArgs(
        "m",
        gpu_memory_utilization=1,
        tensor_parallel_size=tensor,
        data_parallel_size=engines,
        nnodes=nodes,
        master_addr="10.0.0.1",
    )
    rank_device = Device((8 << 30) // (tensor * engines // nodes), 1, on_cpu=True, sharding=Sharding(tensor))
    numbers = Numbers(4, kv_format("auto", "torch.float32"), args.block_size, 2048, 256)
    expected = memory_use(config, numbers, rank_device).num_blocks
    assert plan_kv_cache(args, config, torch.float32, torch.device("cpu")).num_blocks == expected


def test_all_ranks_have_the_blocks_of_the_rank_with_the_least_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker_engine.parallel.device.host_memory", lambda: 4 << 30)
    config, args = ModelConfig.from_dict(TINY), EngineArgs("m", gpu_memory_utilization=1)
    alone = plan_kv_cache(args, config, torch.float32, torch.device("cpu"))
    ranks = RankGroups(engine=_UnequalRanks())
    two = plan_kv_cache(replace(args, tensor_parallel_size=2), config, torch.float32, torch.device("cpu"), ranks)
    # Each rank has half of the heads, and half of the memory.
    assert two.groups[0].bytes_per_token * 2 == alone.groups[0].bytes_per_token
    use = memory_use(
        config,
        Numbers(4, kv_format("auto", "float32"), args.block_size, 2048, 256),
        Device(2 << 30, 1.0, on_cpu=True, sharding=Sharding(tensor=2)),
    )
    assert two.num_blocks == use.num_blocks - 7


@pytest.mark.parametrize(
    ("memory_gib", "name", "options", "sequences", "tokens"),
    [
        (24, "NVIDIA L4", {}, 256, 2048),
        (80, "NVIDIA H100 80GB HBM3", {}, 1024, 8192),
        (80, "NVIDIA H100 80GB HBM3", {"long_prefill_token_threshold": 0}, 1024, 16384),
        (80, "NVIDIA A100-SXM4-80GB", {}, 256, 2048),
        (192, "AMD Instinct MI300X", {}, 1024, 16384),
        (80, "NVIDIA H100 80GB HBM3", {"max_num_seqs": 7}, 7, 8192),
        (80, "NVIDIA H100 80GB HBM3", {"max_num_batched_tokens": 300}, 1024, 300),
        (24, "NVIDIA L4", {"max_num_batched_tokens": 16384, "max_num_seqs": 2000}, 2000, 16384),
    ],
)
def test_limits_of_a_step_are_those_of_the_arguments_or_the_device(
    memory_gib: int, name: str, options: dict[str, int], sequences: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is planned with the same limits."""
    monkeypatch.setattr("stoker_engine.exec.kv_cache.memory_bytes", lambda *_: memory_gib << 30)
    monkeypatch.setattr("stoker_engine.exec.kv_cache.device_name", lambda _: name)
    config, args = ModelConfig.from_dict(TINY), EngineArgs("m", **options)  # type: ignore[arg-type]
    found = plan_kv_cache(args, config, torch.float32, torch.device("cuda"))
    assert (found.max_num_seqs, found.step_tokens) == (sequences, tokens)
    numbers = Numbers(4, kv_format("auto", "torch.float32"), args.block_size, tokens, sequences, fused=True)
    device = Device(memory_gib << 30, args.gpu_memory_utilization, on_cpu=False)
    assert found.num_blocks == memory_use(config, numbers, device).num_blocks


def test_all_ranks_have_the_smallest_limits_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherRank(SingleRank):
        """Its other rank is on a GPU with less memory."""

        def all_gather(self, x: torch.Tensor, widths: Sequence[int] | None = None) -> torch.Tensor:
            theirs = {1024: 256, 8192: 2048}  # its blocks are as many as ours
            return torch.cat([x, torch.tensor([theirs.get(int(x), int(x))])])

    monkeypatch.setattr("stoker_engine.exec.kv_cache.memory_bytes", lambda *_: 80 << 30)
    monkeypatch.setattr("stoker_engine.exec.kv_cache.device_name", lambda _: "NVIDIA H100 80GB HBM3")
    config, ranks = ModelConfig.from_dict(TINY), RankGroups(engine=OtherRank())
    args = EngineArgs("m", tensor_parallel_size=2)
    found = plan_kv_cache(args, config, torch.float32, torch.device("cuda"), ranks)
    assert (found.max_num_seqs, found.step_tokens) == (256, 2048)
    stated = replace(args, max_num_seqs=900, max_num_batched_tokens=9000)
    found = plan_kv_cache(stated, config, torch.float32, torch.device("cuda"), ranks)
    assert (found.max_num_seqs, found.step_tokens) == (900, 9000)


@pytest.mark.parametrize("options", [{}, {"long_prefill_token_threshold": 0}])
def test_limits_of_a_step_on_a_cpu_do_not_depend_on_its_memory(
    options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker_engine.parallel.device.host_memory", lambda: 200 << 30)
    args = EngineArgs("m", **options)  # type: ignore[arg-type]
    found = plan_kv_cache(args, ModelConfig.from_dict(TINY), torch.float32, torch.device("cpu"))
    assert (found.max_num_seqs, found.step_tokens) == (256, 2048)


@pytest.mark.parametrize("fixed", [None, 1 << 20])
def test_adapters_that_do_not_fit_are_refused(fixed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker_engine.parallel.device.host_memory", lambda: 4 << 30)
    config = ModelConfig.from_dict(TINY)
    few = EngineArgs("m", enable_lora=True, max_cpu_loras=8, kv_cache_memory_bytes=fixed)
    plan_kv_cache(few, config, torch.float32, torch.device("cpu"))
    many = replace(few, max_cpu_loras=100_000)
    with pytest.raises(OutOfMemoryError, match=r"adapters .* GiB \(100000 × rank 16\) .* reduce --max-cpu-loras"):
        plan_kv_cache(many, config, torch.float32, torch.device("cpu"))
    plan_kv_cache(replace(many, enable_lora=False, max_cpu_loras=None), config, torch.float32, torch.device("cpu"))
