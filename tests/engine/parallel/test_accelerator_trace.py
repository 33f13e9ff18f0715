"""What ranks on accelerators say to each other in a step, traced on fake devices.

Real: the runner, the model's layers, the groups, torch.distributed's calls. Fake: tensors, which have a device and a
shape and no numbers, and the backend, which moves nothing (torch's own FakeTensorMode and fake process group). What the
host reads of the device is answered by zeros, at the places in the code that may read; nothing else may.
"""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.core.step import NewSequence, Step
from stoker_engine.exec import kv_cache, runner
from stoker_engine.kernels import moe
from stoker_engine.models.checkpoint import Checkpoint
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.model_card import ModelCard
from stoker_engine.parallel import process_ranks
from stoker_engine.parallel.join import Joined, join
from stoker_engine.parallel.layout import Layout
from stoker_engine.parallel.ranks import Alone
from stoker_engine.sampling import logprobs, sampler
from stoker_engine.sizing.weight_formats import ALL_NUMBERS

GIB = 1 << 30
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
MIXTRAL = {
    **LLAMA_8B,
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "sliding_window": None,
}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a backend.

    Attributes:
        shape, dtype: of what travels.
        peer: whom it goes to or comes from, where that is one rank.
    """

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    peer: int | None = None


class Recorder(TorchDispatchMode):
    """Takes down what travels between ranks, and refuses what the host reads of a device.

    Attributes:
        calls: in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if func.namespace == "c10d":
            name = func._opname.strip("_")
            tensor = given[-1]  # what is brought; `given` begins with what is filled
            peer = args[2] if name in ("send", "recv") else None
            self.calls.append(Call(name, tuple(tensor.shape), tensor.dtype, peer))
        if func._opname == "_pin_memory":
            return args[0]  # which fake tensors cannot be
        if func._opname == "bincount":  # of a mixture, the one place where sizes depend on numbers (`kernels.moe`)
            return args[0].new_zeros(args[2] if len(args) > 2 else (kwargs or {})["minlength"])
        result = func(*args, **(kwargs or {}))
        from_device = any(isinstance(each, FakeTensor) and each.device.type == "cuda" for each in given)
        to_host = isinstance(result, torch.Tensor) and result.device.type == "cpu"
        assert not (from_device and to_host), f"{func} reads the device"
        if isinstance(result, FakeTensor):
            result.constant = None  # what came from the host is not known any more
        return result


@dataclasses.dataclass(frozen=True)
class NoWeights:
    """A loader of models without files."""

    def load(self, config: ModelConfig, build: Any, device: torch.device, max_model_len: int, _: Any) -> Decoder:
        with device:
            return Decoder(config, build, max_model_len)

    def weight_formats(self, *_: Any) -> Any:
        return ALL_NUMBERS

    def kv_scales(self, *_: Any) -> dict[int, Any]:
        return {}


def zeros(tensor: torch.Tensor) -> Any:
    """Stands for `to_host`."""
    return functools.reduce(lambda inner, size: [inner] * size, reversed(tensor.shape), 0)


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, Layout], Joined]]:
    """Makes a rank meet the others, who are not there."""
    begin = distributed.init_process_group

    def fake(backend: str, *, store: Any, rank: int, world_size: int, timeout: Any) -> None:
        begin("fake", store=FakeStore(), rank=rank, world_size=world_size)

    monkeypatch.setattr(process_ranks.distributed, "init_process_group", fake)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # as a rank sets it, for good, in its own process
    # In inference mode fake tensors do not see what an operation is made of, and would run some for real.
    inference_mode = torch.inference_mode
    monkeypatch.setattr(torch, "inference_mode", lambda *mode: inference_mode(*mode) if mode else torch.no_grad())
    monkeypatch.setattr(runner, "KVCachePool", kv_cache.KVCachePool)  # no guarded one: there is no memory
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(runner, "resolve_device", lambda args: torch.device("cuda"))
    monkeypatch.setattr(kv_cache, "memory_bytes", lambda device, sharers: 80 * GIB)
    for module in (runner, sampler, logprobs, moe):
        monkeypatch.setattr(module, "to_host", zeros)
    yield lambda rank, layout: join(rank, layout, "file:///dev/null", 1.0)


def trace(meet: Callable[[int, Layout], Joined], config: dict[str, Any], steps: list[Step], **sizes: Any) -> list[Any]:
    """What each rank of a layout calls in `steps`: [rank][step]."""
    args = EngineArgs("m", device="cuda", max_model_len=512, max_num_seqs=8, num_gpu_blocks_override=64, **sizes)
    layout = Layout.of(args)
    checkpoint = Checkpoint(Path("m"), ModelConfig.from_dict(config), ModelCard(), NoWeights())
    traced = []
    for rank in range(layout.size):
        joined = meet(rank, layout)
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                made = runner.Runner(args, checkpoint, groups=dataclasses.replace(joined.groups, copy=Alone()))
                of_rank = []
                for step in steps:
                    with Recorder() as recorder:
                        made.run(step)
                    of_rank.append(recorder.calls)
        finally:
            joined.close()
        traced.append(of_rank)
    return traced


def prompts(*lengths: int, greedy: bool = True) -> Step:
    """A first step of that many prompts."""
    params = SamplingParams(temperature=0) if greedy else SamplingParams(temperature=0.7, logprobs=2)
    new = [
        NewSequence(row, EngineRequest(str(row), [1] * length, params, 5, row), 0, [], [[1 + row]])
        for row, length in enumerate(lengths)
    ]
    rows = array("i", range(len(lengths)))
    return Step(
        0, rows, array("i", [0] * len(rows)), array("i", lengths), array("i", [1] * len(rows)), 0, sum(lengths), new=new
    )


def decodes(*positions: int) -> Step:
    """A step in which each sequence computes a token."""
    rows = array("i", range(len(positions)))
    ones = array("i", [1] * len(rows))
    return Step(1, rows, array("i", positions), ones, ones, len(rows), len(rows))


@pytest.mark.parametrize(("tensor", "experts"), [(2, None), (8, None), (4, "split"), (4, "whole")])
def test_two_sums_a_layer_and_one_gather(
    tensor: int, experts: str | None, meet: Callable[[int, Layout], Joined]
) -> None:
    config = LLAMA_8B if experts is None else MIXTRAL
    config = {**config, "num_hidden_layers": 4}
    whole = experts == "whole"
    traced = trace(
        meet, config, [prompts(9, 16), decodes(9, 16)], tensor_parallel_size=tensor, enable_expert_parallel=whole
    )
    assert all(of_rank == traced[0] for of_rank in traced), "ranks of a stage do not do the same"
    for calls, num_tokens in zip(traced[0], (25, 2), strict=True):
        sums = [call for call in calls if call.operation == "allreduce"]
        assert sums == [Call("allreduce", (num_tokens, 4096), torch.bfloat16)] * (1 + 2 * 4)
        [gather] = [call for call in calls if call.operation != "allreduce"]
        assert gather == Call("allgather_base", (2 * 16,), torch.uint8)  # of each row a number and its place


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 3), (2, 2)])
def test_what_a_stage_sends_the_next_one_receives(
    tensor: int, pipeline: int, meet: Callable[[int, Layout], Joined]
) -> None:
    steps = [prompts(9, 16), decodes(9, 16), prompts(1)]
    traced = trace(
        meet,
        {**LLAMA_8B, "num_hidden_layers": 4},
        steps,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
    )
    layout = Layout(tensor, pipeline)
    for step, num_tokens in enumerate((25, 2, 1)):
        for rank, of_rank in enumerate(traced):
            stage, calls = layout.stage_of(rank), of_rank[step]
            received = [call for call in calls if call.operation == "recv"]
            sent = [call for call in calls if call.operation == "send"]
            hidden = (num_tokens * 4096 * 2,)  # bytes
            assert received == [Call("recv", hidden, torch.uint8, stage.index - 1)] * (not stage.is_first)
            assert sent == [Call("send", hidden, torch.uint8, stage.index + 1)] * (not stage.is_last)
            others = [call for call in calls if call.peer is None]
            assert others == [c for c in traced[layout.tensor_groups()[stage.index][0]][step] if c.peer is None]


def test_rows_that_ask_for_more_are_gathered_and_told(meet: Callable[[int, Layout], Joined]) -> None:
    config = {**LLAMA_8B, "num_hidden_layers": 1}
    traced = trace(meet, config, [prompts(9, 16, greedy=False)], tensor_parallel_size=4)
    assert all(of_rank == traced[0] for of_rank in traced)
    names = [call.operation for call in traced[0][0]]
    assert names.count("broadcast") == 1
