"""The finish processes hidden states: it may pool them, and then needs neither logits nor a KV cache."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.core.step import NewSequence, Step, StepResult
from stoker_engine.exec import build_runner as build_runner_module
from stoker_engine.exec.build_runner import build_runner
from stoker_engine.exec.device_batch import DeviceBatch
from stoker_engine.exec.finish.finish import Complete
from stoker_engine.exec.input_batch import InputBatch
from stoker_engine.exec.inputs import InputBuilder, Inputs
from stoker_engine.exec.kv_cache import KVCachePlan, KVCachePool
from stoker_engine.exec.runner import Runner
from stoker_engine.grammar.grammars import Grammars
from stoker_engine.layers.batch_rows import BatchRows
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.model import StepInputs
from stoker_engine.parallel.rank_groups import OneStage
from stoker_engine.sizing.kv_format import kv_format

BLOCK, CPU = 16, torch.device("cpu")


class MeanPooling:
    """Pools each sequence's hidden states once they are complete. A chunk's sum is kept in its row."""

    def __init__(self, model: Any, batch: InputBatch, keep: frozenset[int] = frozenset()) -> None:
        self.batch, self.keep, self.sums = batch, keep, dict[int, torch.Tensor]()
        self.states: dict[int, list[torch.Tensor]] = {layer: [] for layer in keep}

    def begin(self, step: Step, inputs: Inputs) -> PooledStep:
        """See `Finish`."""
        return PooledStep(self, step, inputs)


@dataclass(frozen=True)
class PooledStep:
    of: MeanPooling
    step: Step
    inputs: Inputs

    @property
    def kept(self) -> torch.Tensor | None:
        """See `StepFinish`: all rows."""
        return None

    def finish(self, hidden: torch.Tensor, states: Mapping[int, torch.Tensor]) -> Complete:
        """See `StepFinish`."""
        pooled, start = {}, 0
        for layer, found in self.of.states.items():
            found.append(states[layer])
        for batch_index, end in enumerate(self.inputs.ends.tolist()):
            row = self.step.rows[batch_index]
            total = hidden[start:end].sum(0)
            if self.step.starts[batch_index]:
                total += self.of.sums[row]
            self.of.sums[row] = total
            num_computed = self.step.starts[batch_index] + self.step.lengths[batch_index]
            if num_computed == self.of.batch.states[row].num_prompt_tokens:
                pooled[batch_index] = (total / num_computed).tolist()
            start = end
        return Complete(StepResult([], pooled=pooled))


def steps_of(prompts: list[list[int]], chunk: int, groups: int) -> list[Step]:
    """Return steps that compute all prompts, `chunk` tokens each per step, without sampling."""
    new, first_block = [], 1
    for row, prompt in enumerate(prompts):
        request = EngineRequest(str(row), prompt, SamplingParams(temperature=0), 1)
        count = -(-len(prompt) // BLOCK)
        ends = range(first_block + count, first_block + count * groups + 1, count)
        blocks = [list(range(end - count, end)) for end in ends]  # separate for each group
        first_block += count * groups
        new.append(NewSequence(row, request, 0, [], blocks))
    steps = []
    for start in range(0, max(map(len, prompts)), chunk):
        lengths = {row: min(chunk, len(prompt) - start) for row, prompt in enumerate(prompts) if len(prompt) > start}
        order = sorted(lengths, key=lambda row: lengths[row] > 1)
        steps.append(
            Step(
                number=len(steps),
                rows=array("i", order),
                starts=array("i", [start] * len(order)),
                lengths=array("i", [lengths[row] for row in order]),
                num_samples=array("i", [0] * len(order)),
                num_decodes=sum(length == 1 for length in lengths.values()),
                num_tokens=sum(lengths.values()),
                new=[] if steps else new,
            )
        )
    return steps


def pooled_by(runner: Runner, steps: list[Step]) -> dict[int, list[float]]:
    """Return the pooled values by row."""
    found = {}
    for step in steps:
        result = runner.run(step)
        assert result.sampled == [] and result.model_time > 0
        found |= {step.rows[batch_index]: vector for batch_index, vector in result.pooled.items()}
    return found


PROMPTS = [[5 + (7 * at + 3 * length) % 90 for at in range(length)] for length in (1, 9, 40, 70)]


@pytest.mark.parametrize("chunk", [7, 70])
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gemma3"])
def test_hidden_states_are_pooled_without_a_head(
    name: str, chunk: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to transformers' hidden states, including those after some inner layers."""
    monkeypatch.setattr(build_runner_module, "KVCachePool", KVCachePool)  # without guards: there is no scheduler
    folder: Path = request.getfixturevalue(name)
    reference = AutoModel.from_pretrained(folder).eval()
    num_layers = reference.config.num_hidden_layers
    keep = frozenset({0, num_layers - 2, num_layers - 1})
    args = EngineArgs(str(folder), num_gpu_blocks_override=100, max_model_len=128, dtype="float32", device="cpu")
    pooling: Any = None

    def make_finish(model: Any, batch: InputBatch) -> MeanPooling:
        nonlocal pooling
        pooling = MeanPooling(model, batch, keep)
        return pooling

    checkpoint = find_checkpoint(args)
    runner = build_runner(
        args, checkpoint, adapt=lambda build: replace(build, has_head=False, hidden_after=keep), make_finish=make_finish
    )
    assert isinstance(runner.model, Decoder) and runner.model.lm_head is None
    assert sum(len(run.layers) for run in runner.model.runs) == num_layers
    steps = steps_of(PROMPTS, chunk, len(runner.plan.groups))
    found = pooled_by(runner, steps)
    with torch.inference_mode():
        outputs = [reference(torch.tensor([prompt]), output_hidden_states=True) for prompt in PROMPTS]
    for row, output in enumerate(outputs):
        expected = output.last_hidden_state[0].mean(0)
        assert torch.allclose(torch.tensor(found[row]), expected, atol=1e-3, rtol=1e-3)
    states = pooling.states
    for layer in keep - {num_layers - 1}:  # transformers applies the norm after its last layer
        ours = {row: list[torch.Tensor]() for row in range(len(PROMPTS))}
        for step, state in zip(steps, states[layer], strict=True):
            for row, part in zip(step.rows, state.split(list(step.lengths)), strict=True):
                ours[row].append(part)
        for row, output in enumerate(outputs):
            together = torch.cat(ours[row])
            assert torch.allclose(together, output.hidden_states[layer + 1][0], atol=1e-3, rtol=1e-3)


class Bidirectional:
    """An encoder of one layer with bidirectional attention, which caches nothing."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.embedding, self.backend, self.config = torch.randn(100, 8), self, SimpleNamespace(hidden_size=8)

    def prepare(self, metadata: Any) -> Any:
        return metadata

    def forward(self, inputs: StepInputs, hidden: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding[inputs.token_ids] + inputs.positions.unsqueeze(1)
        starts = inputs.attention.query_starts.tolist()
        return torch.cat([self.attended(x[a:b]) for a, b in itertools.pairwise(starts)])

    @staticmethod
    def attended(x: torch.Tensor) -> torch.Tensor:
        return (x @ x.T / 8).softmax(-1) @ x


@pytest.mark.parametrize("gathers", [False, True])
def test_a_model_without_a_cache_is_pooled(gathers: bool) -> None:
    """No group of layers has keys and values, hence there is no block table and no slot."""
    plan = KVCachePlan(kv_format("auto", "torch.float32"), (), 0, BLOCK, 128, 256, 8)
    batch = InputBatch(6, 128, BLOCK, plan.groups)
    device_batch = DeviceBatch(batch.values, CPU)
    model: Any = Bidirectional()
    runner = Runner(
        device=CPU,
        dtype=torch.float32,
        plan=plan,
        model=model,
        pool=SimpleNamespace(caches=[], copy=lambda copies: None),  # type: ignore[arg-type]
        batch=batch,
        inputs=InputBuilder(BLOCK, plan.groups, CPU, batch, device_batch, gathers),
        rows=BatchRows(),
        finish=MeanPooling(model, batch),
        grammars=Grammars(100, frozenset()),
        pipeline=OneStage(),
    )
    found = pooled_by(runner, steps_of(PROMPTS, 70, 0))
    for row, prompt in enumerate(PROMPTS):
        alone = model.attended(model.embedding[prompt] + torch.arange(len(prompt)).unsqueeze(1))
        assert np.allclose(found[row], alone.mean(0), atol=1e-5)
