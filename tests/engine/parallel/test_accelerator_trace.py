"""Communication of ranks on accelerators during a step, traced on fake devices.

Real: the runner, the model's layers, the groups, torch.distributed's calls. Fake: tensors (`fake_device`), and the
backend, which moves nothing (torch's own fake process group).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")


from stoker_common.errors import ArgumentError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.step import Step
from stoker_engine.exec.build_runner import build_runner
from stoker_engine.kernels.triton.compile.compile_only import compile_only
from stoker_engine.parallel.communicator import SingleRank
from stoker_engine.parallel.join import Joined
from stoker_engine.parallel.layout import RankLayout

from ...support.engine.fake_device import (
    LLAMA_8B,
    LLAMA_70B,
    MIXTRAL,
    SM_90,
    Call,
    DeviceTrace,
    checkpoint,
    decodes,
    fake_device,
    prompts,
)


@pytest.fixture
def trace(
    meet: Callable[[int, RankLayout], Joined], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[list[DeviceTrace]]]:
    """Trace each rank of a layout in `steps`, or in the first few: [rank][step]."""

    def run(
        config: dict[str, Any], steps: list[Step], ranks: int | None = None, graphs: bool = False, **sizes: Any
    ) -> list[list[DeviceTrace]]:
        args = EngineArgs("m", device="cuda", max_model_len=512, max_num_seqs=8, num_gpu_blocks_override=64, **sizes)
        layout = RankLayout.of(args)
        found = []
        for rank in range(ranks or layout.size):
            joined = meet(rank, layout)
            try:
                with monkeypatch.context() as patch, fake_device(patch, graphs=graphs):
                    groups = dataclasses.replace(joined.groups, engine=SingleRank())
                    with compile_only(SM_90, lambda kernel, key: None):
                        runner = build_runner(args, checkpoint(config), groups=groups)
                    of_rank = []
                    for step in steps:
                        traced = DeviceTrace()
                        with compile_only(SM_90, traced.launched), traced:
                            runner.run(step)
                        of_rank.append(traced)
            finally:
                joined.close()
            found.append(of_rank)
        return found

    return run


Trace = Callable[..., list[list[DeviceTrace]]]


def called(traced: list[list[DeviceTrace]]) -> list[list[list[Call]]]:
    """Return the ranks' calls: [rank][step]."""
    return [[step.calls for step in of_rank] for of_rank in traced]


@pytest.mark.parametrize(("tensor", "experts"), [(2, None), (8, None), (4, "split"), (4, "whole")])
def test_layers_have_two_all_reduces_and_steps_one_gather(tensor: int, experts: str | None, trace: Trace) -> None:
    config = LLAMA_8B if experts is None else MIXTRAL
    config = {**config, "num_hidden_layers": 4}
    whole = experts == "whole"
    steps = [prompts(9, 16), decodes(9, 16)]
    traced = called(trace(config, steps, tensor_parallel_size=tensor, enable_expert_parallel=whole))
    assert all(of_rank == traced[0] for of_rank in traced), "ranks of a stage make different calls"
    for calls, num_tokens in zip(traced[0], (25, 2), strict=True):
        sums = [call for call in calls if call.operation == "allreduce"]
        # After its attention, the last layer computes only the two tokens that have logits.
        sizes = [num_tokens] * (2 * 4 - 1) + [2, 2]
        assert sums == [Call("allreduce", (size, 4096), torch.bfloat16) for size in sizes]
        [gather] = [call for call in calls if call.operation != "allreduce"]
        assert gather == Call("allgather_base", (2 * 16,), torch.uint8)  # each row's value and index


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 3), (2, 2)])
def test_hidden_states_sent_by_a_stage_are_received_by_the_next(tensor: int, pipeline: int, trace: Trace) -> None:
    steps = [prompts(9, 16), decodes(9, 16), prompts(1)]
    config = {**LLAMA_8B, "num_hidden_layers": 4}
    traced = called(trace(config, steps, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline))
    layout = RankLayout(tensor, pipeline)
    for step, num_tokens in enumerate((25, 2, 1)):
        for rank, of_rank in enumerate(traced):
            stage, calls = layout.stage_of(rank), of_rank[step]
            received = [call for call in calls if call.operation == "recv"]
            sent = [call for call in calls if call.operation == "send"]
            hidden = (num_tokens * 4096 * 2,)  # bytes
            assert received == [Call("recv", hidden, torch.uint8, stage.index - 1)] * (not stage.is_first)
            assert sent == [Call("send", hidden, torch.uint8, stage.index + 1)] * (not stage.is_last)
            collectives = [call for call in calls if call.peer is None]
            assert collectives == [c for c in traced[layout.tensor_groups()[stage.index][0]][step] if c.peer is None]


@pytest.mark.parametrize(("tensor", "pipeline"), [(4, 1), (2, 2)])
def test_sampled_tokens_are_broadcast_once_but_not_in_a_pipeline(tensor: int, pipeline: int, trace: Trace) -> None:
    config = {**LLAMA_8B, "num_hidden_layers": pipeline}
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    traced = called(trace(config, [prompts(9, 16, greedy=False)], **sizes))[-tensor:]
    assert all(of_rank == traced[0] for of_rank in traced)
    names = [call.operation for call in traced[0][0]]
    assert names.count("broadcast") == (pipeline == 1)


def test_layers_of_tensor_parallel_ranks_launch_few_kernels(trace: Trace) -> None:
    steps = [prompts(9, 16), decodes(9, 16)]
    two, three = (
        trace({**LLAMA_70B, "num_hidden_layers": count}, steps, ranks=1, tensor_parallel_size=8)[0] for count in (2, 3)
    )
    for less, more in zip(two, three, strict=True):
        launched = more.launches - less.launches
        assert launched.total() <= 10, launched
        assert len(more.calls) - len(less.calls) == 2
        assert more.uploads == 1


def test_batch_invariance_refuses_tensor_parallelism_on_gpus(trace: Trace) -> None:
    with pytest.raises(ArgumentError, match=r"--batch-invariant.*--tensor-parallel-size 1"):
        trace(LLAMA_8B, [], ranks=1, tensor_parallel_size=2, batch_invariant=True)


def test_replayed_steps_communicate_as_eager_ones_of_the_padded_size(trace: Trace) -> None:
    """Except for hidden states between stages, which are sent and received outside of graphs, without padding."""
    steps, padded = [prompts(9, 16, 5), decodes(9, 16, 5)], [prompts(9, 16, 5, 7), decodes(9, 16, 5, 7)]
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    config = {**LLAMA_8B, "num_hidden_layers": 2}
    replayed, eager, of_four = (
        trace(config, each, graphs=graphs, **sizes) for each, graphs in ((steps, True), (steps, False), (padded, False))
    )
    for rank, (prompt, decode) in enumerate(replayed):
        count = len([call for call in eager[rank][0].calls if call.operation == "allreduce"])
        chunks = [call for call in prompt.calls if call.operation == "allreduce"]
        assert chunks == [Call("allreduce", (32, 4096), torch.bfloat16)] * count  # the last layer computes all tokens
        sums = [call for call in of_four[rank][1].calls if call.operation == "allreduce"]
        assert [call for call in decode.calls if call.operation == "allreduce"] == sums
        for index, step in enumerate((prompt, decode)):
            gathered = [call for call in of_four[rank][index].calls if "allgather" in call.operation]
            assert [call for call in step.calls if "allgather" in call.operation] == gathered
            assert bool(gathered) == (rank >= 2)  # only the last stage samples
            others = [call for call in eager[rank][index].calls if call.operation in ("send", "recv")]
            assert [call for call in step.calls if call.operation in ("send", "recv")] == others
            assert len(step.calls) == len(eager[rank][index].calls)
        assert decode.uploads == eager[rank][1].uploads == 1


@pytest.mark.parametrize(("rank", "graphs"), [(0, False), (1, True)])
def test_ranks_launch_a_step_before_they_read_the_previous_one(
    rank: int, graphs: bool, meet: Callable[[int, RankLayout], Joined], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if tokens are drawn, which are broadcast on the device. Both ranks then read them from their own."""
    args = EngineArgs(
        "m", device="cuda", max_model_len=512, max_num_seqs=8, num_gpu_blocks_override=64, tensor_parallel_size=2
    )
    later = [decodes(9, 16), decodes(10, 17), decodes(11, 18)]
    joined = meet(rank, RankLayout.of(args))
    try:
        with monkeypatch.context() as patch, fake_device(patch, graphs=graphs) as reads:
            groups = dataclasses.replace(joined.groups, engine=SingleRank())
            with compile_only(SM_90, lambda kernel, key: None):
                runner = build_runner(args, checkpoint({**LLAMA_8B, "num_hidden_layers": 2}), groups=groups)
            with compile_only(SM_90, lambda kernel, key: None), DeviceTrace():
                for first in (
                    prompts(9, 16),
                    prompts(9, 16, greedy=False, logprobs=None, top_k=5),
                    prompts(9, 16, greedy=False, min_tokens=3, logprobs=2, prompt_logprobs=1),
                    prompts(9, 16, repetition_penalty=1.1),
                ):
                    runner.batch.clear()
                    runner.launch(first)
                    for step in later:
                        reads.clear()
                        runner.launch(step)
                        assert reads == []
                        runner.collect()
                        assert (2,) in reads
                    runner.collect()
    finally:
        joined.close()
