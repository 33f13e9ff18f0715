"""Operations that depend on the request find its row in all row spaces.

A request's output in a batch equals its output alone, by a model that adds the same to every row. All operations add
something: linear operations, router, experts, embedding and head.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker_common.block_hash import CacheKeys
from stoker_engine import SamplingParams
from stoker_engine.attention.backend import BackendCapabilities
from stoker_engine.attention.metadata import AttentionMetadata
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.engine import Engine
from stoker_engine.exec import build_runner as build_runner_module
from stoker_engine.exec.build_runner import build_runner
from stoker_engine.exec.executor import LocalExecutor
from stoker_engine.exec.graphs import StepGraphs
from stoker_engine.kernels.cpu.library import cpu_library
from stoker_engine.layers.batch_rows import RowSpace
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.models.decoder import Decoder

from ...support.engine.device_steps import replayed, sample_on_device
from ...support.engine.repeating_proposer import RepeatingProposer
from ...support.engine.row_tables import RowTables
from ...support.engine.thread_ranks import ThreadExecutor
from ...support.engine.tiny_configs import FAMILIES as TINY_FAMILIES
from ...support.engine.tiny_configs import MIXTURES
from ...support.engine.tiny_models import random_model
from ..models.test_tensor_parallel import save

ADAPTERS, EVERY_SPACE = 3, set(RowSpace) - {RowSpace.EXPERTS}
SMALL: dict[str, Any] = {
    "max_model_len": 200, "max_num_seqs": 6, "dtype": "float32", "device": "cpu", "long_prefill_token_threshold": 0,
}  # fmt: skip
#: Tolerance of log-probabilities: ranks sum their tables in another order.
NEAR = 2e-3


def requests(seed: int, vocabulary: int, count: int = 7, longest: int = 9) -> list[EngineRequest]:
    """Return prompts below and above 64 tokens, several with a shared prefix; with each adapter, and without."""
    rng, made = random.Random(seed), []
    shared = [rng.randrange(5, vocabulary) for _ in range(40)]
    for index in range(count):
        own = [rng.randrange(5, vocabulary) for _ in range(rng.choice((1, 3, 30, 90)))]
        adapter = rng.randrange(-1, ADAPTERS)
        params = SamplingParams(
            temperature=0,
            max_tokens=rng.randrange(3, longest),
            ignore_eos=True,
            logprobs=1,
            prompt_logprobs=1 if index % 3 == 1 else None,
            n=2 if index % 3 == 2 else 1,
        )
        keys = CacheKeys(root_key=b"" if adapter < 0 else bytes([adapter]))
        prompt = shared[: rng.choice((0, 40))] + own
        made.append(EngineRequest(str(index), prompt, params, params.max_tokens or 0, cache_keys=keys, adapter=adapter))
    return made


Found = dict[tuple[str, int], list[Any]]


def generated(engine: Engine, submitted: Sequence[EngineRequest]) -> Found:
    """Run all requests together; return tokens and log-probabilities, by request and sequence."""
    found: Found = {}
    for request in submitted:
        engine.add(request)
    while engine.has_work:
        for delta in engine.step().deltas:
            each = found.setdefault((delta.request_id, delta.index), [])
            each += [("prompt", logprobs.logprobs[0]) for logprobs in delta.prompt_logprobs or []]
            each += [(t, of.logprobs[0]) for t, of in zip(delta.token_ids, delta.logprobs or [], strict=True)]
    engine.shutdown()
    return found


def local(args: EngineArgs, extend: RowTables, on_device: bool = False, **options: Any) -> Engine:
    """Return an engine of one process."""
    checkpoint = find_checkpoint(args)
    runner = build_runner(args, checkpoint, adapt=lambda build: replace(build, extend=extend))
    if on_device:
        sample_on_device(runner)
    executor = LocalExecutor(runner, overlap=bool(args.async_scheduling) and not on_device)
    return Engine(args, checkpoint, executor=executor, **options)


def one_by_one(args: EngineArgs, submitted: Sequence[EngineRequest], native: bool) -> Found:
    """Run each request alone, with a model that adds its adapter's vectors to every row."""
    found: Found = {}
    for adapter in sorted({request.adapter for request in submitted}):
        for request in submitted:
            if request.adapter == adapter:
                engine = local(args, tables(native, only=adapter))
                found |= generated(engine, [replace(request, adapter=-1)])
    return found


def tables(native: bool = True, **options: Any) -> RowTables:
    library = cpu_library(torch.device("cpu"), torch.float32) if native else None
    return RowTables(ADAPTERS, library=library, **options)


def check_alike(ours: Found, expected: Found) -> None:
    assert ours.keys() == expected.keys()
    for key, sequence in expected.items():
        assert [token for token, _ in ours[key]] == [token for token, _ in sequence], key
        found, expected_logprobs = ([value for _, value in each] for each in (ours[key], sequence))
        assert np.allclose(found, expected_logprobs, atol=NEAR), key


def saved(name: str, folder: Path) -> tuple[Path, int]:
    save(name, folder)
    return folder, 131


#: Whole layers in one call; experts; a bottleneck with experts; norms with biases and learned positions; parallel
#: attention and MLP; a tied head.
FAMILIES = ["llama", "gemma3", "mixtral", "deepseek_v3", "gpt2", "gpt_neox", "llama biases, tied"]


@pytest.mark.parametrize("budget", [24, 256])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_equals_its_requests_one_by_one(name: str, budget: int, tmp_path: Path) -> None:
    folder, vocabulary = saved(name, tmp_path)
    args = EngineArgs(str(folder), num_gpu_blocks_override=400, max_num_batched_tokens=budget, **SMALL)
    submitted = requests(budget + len(name), vocabulary)
    extend = tables()
    engine = local(args, extend)
    model = engine.executor.runner.model  # type: ignore[attr-defined]
    assert isinstance(model, Decoder)
    is_whole = all(run.whole is not None for run in model.runs)
    assert is_whole == (name in ("llama", "gemma3", "llama biases, tied"))
    ours = generated(engine, submitted)
    has_experts = name in ("mixtral", "deepseek_v3")
    assert extend.seen == EVERY_SPACE | ({RowSpace.EXPERTS} if has_experts else set())
    check_alike(ours, one_by_one(args, submitted, native=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TINY_FAMILIES, *MIXTURES])
def test_every_family_equals_its_requests_one_by_one(name: str, tmp_path: Path) -> None:
    model_type, options = {**TINY_FAMILIES, **MIXTURES}[name]
    random_model(model_type, {"vocab_size": 131, **options}, std=0.2).save_pretrained(tmp_path)
    args = EngineArgs(str(tmp_path), num_gpu_blocks_override=400, max_num_batched_tokens=37, **SMALL)
    submitted = requests(len(name), 131, count=4)
    check_alike(generated(local(args, tables()), submitted), one_by_one(args, submitted, native=False))


def test_each_adapter_changes_the_output(tiny_llama: Path) -> None:
    """Verifies that the comparisons above are meaningful."""
    args = EngineArgs(str(tiny_llama), num_gpu_blocks_override=400, max_num_batched_tokens=64, **SMALL)
    request = requests(1, 500)[0]
    outputs = [
        generated(local(args, tables()), [replace(request, adapter=adapter, cache_keys=CacheKeys())])
        for adapter in range(-1, ADAPTERS)
    ]
    assert len({repr(output) for output in outputs}) == ADAPTERS + 1


@pytest.mark.parametrize("how", ["preempted", "in flight", "in flight on a device", "drafts"])
def test_preemption_steps_in_flight_and_drafts_change_no_output(how: str, tiny_llama: Path) -> None:
    blocks = 16 if how == "preempted" else 400
    args = EngineArgs(
        str(tiny_llama), num_gpu_blocks_override=blocks, max_num_batched_tokens=48,
        async_scheduling=how.startswith("in flight"), **SMALL,
    )  # fmt: skip
    submitted = requests(11, 500, count=12)
    proposer = RepeatingProposer() if how == "drafts" else None
    engine = local(args, tables(), on_device=how.endswith("on a device"), proposer=proposer)
    ours = generated(engine, submitted)
    assert (engine.scheduler.num_preemptions > 0) == (how == "preempted")
    roomy = replace(args, num_gpu_blocks_override=400, async_scheduling=False)
    check_alike(ours, one_by_one(roomy, submitted, native=True))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", {"tensor_parallel_size": 2}),
        ("llama", {"pipeline_parallel_size": 2}),
        ("qwen2_moe", {"tensor_parallel_size": 2}),
        ("qwen2_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("llama biases, tied", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    ],
    ids=str,
)
def test_ranks_give_the_outputs_of_one_process(name: str, layout: dict[str, Any], tmp_path: Path) -> None:
    folder, vocabulary = saved(name, tmp_path)
    alone = EngineArgs(str(folder), num_gpu_blocks_override=400, max_num_batched_tokens=48, **SMALL)
    args, submitted = replace(alone, **layout), requests(5, vocabulary)
    executor = ThreadExecutor(args, extend=tables)
    ours = generated(Engine(args, find_checkpoint(args), executor=executor), submitted)
    check_alike(ours, one_by_one(alone, submitted, native=False))


class Captured(SdpaBackend):
    """Attention that can be captured: it only reads the metadata's tensors."""

    capabilities = BackendCapabilities(captures_steps=True)

    def prepare(self, metadata: AttentionMetadata) -> Any:
        has_chunks = metadata.num_decodes < len(metadata.seq_lens_host)
        is_captured = metadata.graph_decodes is not None or not has_chunks
        return metadata if is_captured else super().prepare(metadata)

    def fits(self, seq_lens: np.ndarray, planned: np.ndarray) -> bool:
        return bool((seq_lens <= planned).all())

    def forward(self, shape: Any, query: Any, key: Any, value: Any, cache: Any, plan: Any) -> torch.Tensor:
        if not isinstance(plan, AttentionMetadata):
            return super().forward(shape, query, key, value, cache, plan)
        group = plan.groups[cache.group]
        is_stored = group.slot_mapping >= 0
        slots = group.slot_mapping[is_stored]
        is_held = torch.arange(group.tables.shape[1]) * plan.block_size < plan.seq_lens.unsqueeze(1)
        read = []
        for stored, new in ((cache.key, key), (cache.value, value)):
            stored[slots // plan.block_size, slots % plan.block_size] = new[is_stored]
            blocks = stored.new_zeros(*group.tables.shape, *stored.shape[1:])
            blocks[is_held] = stored[group.tables[is_held]]
            read.append(blocks.flatten(1, 2))
        tokens = torch.arange(len(query), dtype=torch.int32)
        sequence = torch.searchsorted(plan.query_starts, tokens, right=True) - 1
        positions = plan.seq_lens[sequence] - plan.query_starts[sequence + 1] + tokens
        is_seen = torch.arange(read[0].shape[1]) <= positions.unsqueeze(1)
        keys, values = (each[sequence].masked_fill(~is_seen.view(*is_seen.shape, 1, 1), 0) for each in read)
        grouped = query.unflatten(1, (shape.num_kv_heads, -1))
        scores = torch.einsum("tkgd,tckd->tkgc", grouped, keys) * shape.scale
        scores = scores.masked_fill(~is_seen.view(len(query), 1, 1, -1), -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0)
        return torch.einsum("tkgc,tckd->tkgd", weights, values).flatten(1)


@pytest.mark.parametrize("delta", [0, 5])
def test_captured_graphs_give_the_outputs_of_eager_steps(
    delta: int, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs gather token ids, positions and adapters by rows; a row's positions may be shifted. They compute decodes,
    chunks of prompts, also such whose log-probabilities are requested, and drafts."""
    monkeypatch.setattr(build_runner_module, "attention_backend", lambda *_: Captured())
    args = EngineArgs(str(tiny_llama), num_gpu_blocks_override=400, max_num_batched_tokens=48, **SMALL)
    submitted = [request for request in requests(3, 500, count=9, longest=20) if request.params.n == 1]  # type: ignore[union-attr]
    extend = tables(native=False)
    expected = None
    for graphs, in_flight, proposer in (
        (False, False, None),
        (True, False, None),
        (True, True, None),
        (True, False, RepeatingProposer()),
    ):
        in_args = replace(args, async_scheduling=in_flight)
        engine = local(in_args, extend, on_device=in_flight, proposer=proposer)
        runner = engine.executor.runner  # type: ignore[attr-defined]
        begin = runner.batch._begin

        def shifted(new: Any, begin: Any = begin, batch: Any = runner.batch) -> None:
            begin(new)
            batch.values[3, new.row] = delta

        monkeypatch.setattr(runner.batch, "_begin", shifted)
        if graphs:
            runner.inputs = replace(runner.inputs, gathers=True)
            runner.graphs = StepGraphs(
                runner.model, runner.plan, runner.pool.caches, runner.inputs.device_batch, runner.rows, 6,
                runner.batch.tables.shape[2], runner.device,
            )  # fmt: skip
            with torch.inference_mode():
                runner.graphs.capture(replayed)
            find, num_found = runner.graphs.find, Counter[tuple[bool, bool]]()

            def counted(step: Any, has_adapters: bool, find: Any = find, found: Any = num_found) -> Any:
                graph = find(step, has_adapters)
                if graph is not None:
                    found[graph.shape.has_chunks, bool(step.drafts)] += 1
                return graph

            monkeypatch.setattr(runner.graphs, "find", counted)
        found = generated(engine, submitted)
        if expected is not None:
            check_alike(found, expected)
            assert num_found[False, False] > 0 and num_found[True, False] > 5
            assert num_found[True, True] > 5 or proposer is None
        expected = found
    if delta == 0:
        assert expected is not None
        check_alike(expected, one_by_one(args, submitted, native=False))


def test_a_padded_graph_returns_only_the_hidden_states_of_its_step(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three decodes run in a graph of four: the finish does not get the fourth one's hidden states."""
    monkeypatch.setattr(build_runner_module, "attention_backend", lambda *_: Captured())
    args = EngineArgs(str(tiny_llama), num_gpu_blocks_override=400, max_num_batched_tokens=48, **SMALL)
    checkpoint = find_checkpoint(args)
    runner = build_runner(args, checkpoint, adapt=lambda build: replace(build, hidden_after=frozenset({0})))
    runner.inputs = replace(runner.inputs, gathers=True)
    runner.graphs = StepGraphs(
        runner.model, runner.plan, runner.pool.caches, runner.inputs.device_batch, runner.rows, 6,
        runner.batch.tables.shape[2], runner.device,
    )  # fmt: skip
    with torch.inference_mode():
        runner.graphs.capture(replayed)
    lengths, begin, padded = list[tuple[int, ...]](), runner.finish.begin, 0

    def noted(step: Any, inputs: Any) -> Any:
        nonlocal padded
        of_step = begin(step, inputs)
        finish = of_step.finish
        padded += len(inputs.token_rows) > step.num_tokens

        def finished(hidden: torch.Tensor, states: Any) -> Any:
            lengths.append((len(step.rows), len(inputs.ends), step.num_tokens, len(states[0])))
            return finish(hidden, states)

        of_step.finish = finished  # type: ignore[method-assign]
        return of_step

    monkeypatch.setattr(type(runner.finish), "begin", lambda self, step, inputs: noted(step, inputs))
    engine = Engine(args, checkpoint, executor=LocalExecutor(runner, overlap=False))
    generated(engine, [replace(request, adapter=-1) for request in requests(2, 500, count=3)])
    assert padded > 0
    assert all(rows == ends and tokens == states for rows, ends, tokens, states in lengths)


def test_loading_a_part_extends_only_the_computed_layers(tmp_path: Path) -> None:
    """The whole model, created on the meta device for its parameters' names, is not extended."""
    folder, _ = saved("llama", tmp_path)
    args = EngineArgs(str(folder), num_gpu_blocks_override=40, max_num_batched_tokens=48, **SMALL)
    names = list[str]()

    def extend(linear: Any, site: Any, rows: Any) -> Any:
        names.extend(site.outputs)
        assert torch.get_default_device().type != "meta"
        return linear

    build_runner(
        args,
        find_checkpoint(args),
        adapt=lambda build: replace(build, extend=extend, has_head=False),
        make_finish=lambda model, batch: None,  # type: ignore[arg-type,return-value]
    )
    assert "embed" in names and "lm_head" not in names


@pytest.mark.parametrize("budget", [24, 80])
def test_a_chunk_that_samples_nothing_ends_at_the_last_attention(budget: int, tiny_llama: Path) -> None:
    """Also within a call of whole layers, for up to 64 tokens and for more."""
    args = EngineArgs(str(tiny_llama), num_gpu_blocks_override=400, max_num_batched_tokens=budget, **SMALL)
    extend = tables()
    engine = local(args, extend)
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.add(EngineRequest("a", list(range(5, 105)), params, 1, adapter=1))
    engine.step()
    assert extend.seen == {RowSpace.TOKENS}
    engine.step()
    while engine.has_work:
        engine.step()
    engine.shutdown()
    assert extend.seen == EVERY_SPACE
