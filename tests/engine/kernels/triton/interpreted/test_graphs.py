"""Decodes from fixed memory, padded, as CUDA graphs compute them: they have the results of other steps.

Instead of a graph's replay, the step is computed again, with the current contents of the same memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stoker_engine import LLM, SamplingParams
from stoker_engine.core.outputs import RequestOutput
from stoker_engine.exec import build_runner as build_runner_module
from stoker_engine.exec import graphs as graphs_module
from stoker_engine.exec.executor import LocalExecutor
from stoker_engine.exec.graphs import StepGraph, StepGraphs
from stoker_engine.kernels.triton.attention import decode, decode_splits, merge
from stoker_engine.kernels.triton.bundle import TRITON

from .....support.engine.device_steps import sample_on_device
from ....integration.test_lora import Served
from .conftest import ON_CHIP

pytestmark = pytest.mark.skipif(ON_CHIP, reason="engines on GPUs have CUDA graphs")


def again(compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
    found = compute()

    def replay() -> None:
        found.copy_(compute())

    return found, replay


def captured(llm: LLM) -> list[StepGraph]:
    """Replay the engine's decodes; return the graphs that are used from now on."""
    executor = llm.engine.executor  # type: ignore[union-attr]
    assert isinstance(executor, LocalExecutor)
    runner, found = executor.runner, list[StepGraph]()
    sample_on_device(runner)
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
    with torch.inference_mode():
        graphs.capture(again)
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
    monkeypatch.setattr(graphs_module, "_SHORTEST", 64)
    for module in (decode_splits, decode, merge):  # contexts of a few tokens have several parts
        monkeypatch.setattr(module, "PART_SIZES", decode_splits.PartSizes(32, 64, 128, 64, 128))
    path: Path = request.getfixturevalue(model)
    sizes = {"num_gpu_blocks_override": 120, "max_model_len": 160, "max_num_batched_tokens": 24, "max_num_seqs": 5}
    rng = random.Random(1)
    prompts = [[rng.randrange(2, 500) for _ in range(count)] for count in (1, 70, 9, 30)]
    lengths = [9, 10, 7, 5]
    sizes |= {"device": "cpu", "attention_backend": "triton"}
    expected = outputs(LLM(str(path), **{**sizes, **options}), prompts, lengths)  # type: ignore[arg-type]
    llm = LLM(str(path), **{**sizes, **options})  # type: ignore[arg-type]
    llm.engine._max_in_flight = 2  # type: ignore[union-attr]
    found = captured(llm)
    for ours, theirs in zip(outputs(llm, prompts, lengths), expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert ours.outputs[0].cumulative_logprob == pytest.approx(theirs.outputs[0].cumulative_logprob, abs=1e-4)
    assert {graph.size for graph in found} >= {1, 2, 4}
    assert len({int(graph.planned[0]) for graph in found}) > 1 or "batch_invariant" in options


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
    graphs = llm.engine.executor.runner.graphs  # type: ignore[union-attr]
    used = {shape.has_adapters for shape, of_shape in graphs.captured.items() if set(of_shape) & set(found)}
    assert used == {False, True}
