"""Steps from fixed memory, padded, as CUDA graphs compute them: they have the results of other steps.

Instead of a graph's replay, the step is computed again, with the current contents of the same memory.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker_engine import LLM, SamplingParams
from stoker_engine.core.outputs import RequestOutput
from stoker_engine.exec import build_runner as build_runner_module
from stoker_engine.exec.executor import LocalExecutor
from stoker_engine.exec.graphs import StepGraph, StepGraphs
from stoker_engine.exec.inputs import Inputs
from stoker_engine.kernels.triton.attention import decode, decode_splits, merge
from stoker_engine.kernels.triton.bundle import TRITON
from stoker_engine.layers.batch_rows import PADDING
from stoker_engine.sizing import step_shapes

from .....support.engine.device_steps import sample_by_graphs, sample_on_device
from .....support.engine.repeating_proposer import RepeatingProposer
from .....support.engine.tiny_models import tiny_mixture
from ....integration.test_lora import Served
from .conftest import ON_CHIP

pytestmark = pytest.mark.skipif(ON_CHIP, reason="engines on GPUs have CUDA graphs")


def captured(llm: LLM) -> list[StepGraph]:
    """Replay the engine's steps and their sampling; return the graphs of steps that are used from now on."""
    executor = llm.engine.executor  # type: ignore[union-attr]
    assert isinstance(executor, LocalExecutor)
    runner, found = executor.runner, list[StepGraph]()
    sample_on_device(runner)
    sample_by_graphs(runner)
    graphs = StepGraphs(
        runner.model,
        runner.plan,
        runner.pool.caches,
        runner.inputs.device_batch,
        runner.rows,
        max_seqs=4,
        max_blocks=runner.batch.tables.shape[2],
        device=runner.device,
        has_adapters=runner.adapters is not None,
    )

    def capture(compute: Any) -> tuple[torch.Tensor, Callable[[], None]]:
        """Compute only the largest step, because all graphs write to its address."""
        hidden = compute() if graphs._hidden is None else graphs._hidden[: compute.args[0].tokens]
        return hidden, compute

    with torch.inference_mode():
        graphs.capture(capture)
    find = graphs.find

    def noted(step, has_adapters):  # type: ignore[no-untyped-def]
        graph = find(step, has_adapters)
        if graph is not None:
            found.append(graph)
        return graph

    graphs.find = noted  # type: ignore[method-assign]
    runner.graphs = graphs
    return found


def outputs(llm: LLM, prompts: list[list[int]], lengths: list[int]) -> list[RequestOutput]:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=0) for n in lengths]
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("tiny_llama", {}),
        pytest.param("tiny_gemma3", {"kv_cache_dtype": "fp8_per_token_head"}, marks=pytest.mark.slow(drawn=False)),
        pytest.param("tiny_llama", {"batch_invariant": True}, marks=pytest.mark.slow(drawn=False)),
    ],
    ids=["llama", "windows, 8 bits", "batch-invariant"],
)
def test_replayed_steps_equal_eager_steps(
    model: str, options: dict[str, object], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_shapes, "_SHORTEST", 32)
    for module in (decode_splits, decode, merge):  # contexts of a few tokens have several parts
        monkeypatch.setattr(module, "PART_SIZES", decode_splits.PartSizes(32, 64, 128, 64, 128))
    path: Path = request.getfixturevalue(model)
    sizes = {"num_gpu_blocks_override": 120, "max_model_len": 96, "max_num_batched_tokens": 16, "max_num_seqs": 5}
    rng = random.Random(1)
    prompts = [[rng.randrange(2, 500) for _ in range(count)] for count in (1, 40, 9)]
    lengths = [14, 7, 4]  # at the end one short sequence decodes alone: it fits the graph for the shortest
    sizes |= {"device": "cpu", "attention_backend": "triton"}
    expected = outputs(LLM(str(path), **{**sizes, **options}), prompts, lengths)  # type: ignore[arg-type]
    llm = LLM(str(path), **{**sizes, **options})  # type: ignore[arg-type]
    llm.engine._max_in_flight = 2  # type: ignore[union-attr]
    found = captured(llm)
    for ours, theirs in zip(outputs(llm, prompts, lengths), expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert ours.outputs[0].cumulative_logprob == pytest.approx(theirs.outputs[0].cumulative_logprob, abs=1e-4)
    assert {graph.shape.tokens for graph in found if not graph.shape.has_chunks} >= {1, 2, 4}
    assert {graph.shape.tokens for graph in found if graph.shape.has_chunks} >= {8, 16}
    planned = {int(graph.planned[0]) for graph in found if not graph.shape.has_chunks}
    assert len(planned) > 1 or "batch_invariant" in options


def test_replayed_steps_use_adapters_that_are_loaded_later(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more adapters than slots, so slots change owners between steps of one graph."""
    monkeypatch.setattr(build_runner_module, "select_kernels", lambda *_: TRITON)
    monkeypatch.setattr(build_runner_module, "cpu_library", lambda *_: None)
    served = Served("qwen3", tmp_path, tiny_llama)
    sizes = {"num_gpu_blocks_override": 120, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    llm = served.llm(attention_backend="triton", **sizes)
    found = captured(llm)
    choices, rng = (0, -1, 2, 1), random.Random(1)
    prompts = [[rng.randrange(2, 128) for _ in range(count)] for count in (3, 9, 1, 12)]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (4, 24, 6, 5)]
    requests = [served.request(adapter) for adapter in choices]
    generated = llm.generate(prompts, params, lora_request=requests, use_tqdm=False)
    for adapter, prompt, output in zip(choices, prompts, generated, strict=True):
        served.check(adapter, prompt, output.outputs[0].token_ids)
    assert {graph.shape[2:] for graph in found} >= {(False, False), (False, True), (True, True)}


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.usefixtures("unwritten_is_nan")
def test_padding_of_a_mixture_is_finite(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unwritten memory and released blocks are NaN, which would reach the router and the experts' tiles. Steps have
    decodes, chunks and drafts."""
    monkeypatch.setattr(build_runner_module, "select_kernels", lambda *_: TRITON)
    tiny_mixture("mixtral").save_pretrained(tmp_path)
    for file in tiny_llama.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    sizes = {"num_gpu_blocks_override": 60, "max_model_len": 64, "max_num_batched_tokens": 12, "max_num_seqs": 3}
    options = {"device": "cpu", "dtype": "float32", "attention_backend": "triton", "block_size": 4, **sizes}
    rng = random.Random(2)
    prompts = [[rng.randrange(2, 128) for _ in range(count)] for count in (3, 17, 1, 9)]
    expected = outputs(LLM(str(tmp_path), **options), prompts, [6, 4, 7, 5])  # type: ignore[arg-type]
    llm = LLM(str(tmp_path), **options)  # type: ignore[arg-type]
    found, run = captured(llm), StepGraph.run
    llm.engine.scheduler._proposer = RepeatingProposer()  # type: ignore[union-attr]
    num_padding = 0

    def checked(graph: StepGraph, inputs: Inputs) -> torch.Tensor:
        nonlocal num_padding
        hidden = run(graph, inputs)
        assert hidden.isfinite().all()
        num_padding += int((inputs.token_rows == PADDING).sum())
        return hidden

    monkeypatch.setattr(StepGraph, "run", checked)
    for ours, theirs in zip(outputs(llm, prompts, [6, 4, 7, 5]), expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert ours.outputs[0].cumulative_logprob == pytest.approx(theirs.outputs[0].cumulative_logprob, abs=1e-4)
    assert num_padding > 10
    assert any(graph.shape.has_chunks for graph in found)
