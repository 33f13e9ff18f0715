"""Steps of the real runner on a simulated accelerator.

Real: the runner, the model's layers, the kernels' host functions. Fake: tensors, which have a device and a shape but no
values (torch's own FakeTensorMode). The host's reads from the device return zeros at the places in the code that may
read; reads anywhere else fail.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from triton.backends.compiler import GPUTarget

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.quantization.quantization_config import QuantizationConfig
from stoker_engine.architectures.quantization.read import read_quantization
from stoker_engine.architectures.stored_formats import GGUF_FORMATS
from stoker_engine.core.adapter import NO_ADAPTER
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.grammar import Grammar
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.core.step import Draft, NewSequence, Step
from stoker_engine.exec import build_runner, kv_cache
from stoker_engine.exec.finish.sampling_graphs import SamplingGraphs
from stoker_engine.exec.graphs import StepGraphs
from stoker_engine.kernels.triton.compile.compile_only import HostFunctions
from stoker_engine.models.checkpoint import Checkpoint
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.decoder_loader import settle
from stoker_engine.models.loading.stored_weights import with_formats
from stoker_engine.models.model_card import ModelCard
from stoker_engine.parallel import transfer
from stoker_engine.parallel.communicator import Communicator
from stoker_engine.sizing.named_experts import first_expert
from stoker_engine.sizing.packed_weights import formats_on_gpus
from stoker_engine.sizing.planned_formats import on_load_formats, stated_formats
from stoker_engine.sizing.weight_formats import ALL_NUMBERS, WeightFormats
from stoker_engine.sizing.weight_sizes import matrices

GIB: Final = 1 << 30
SM_90: Final = GPUTarget("cuda", 90, 32)

LLAMA_8B: Final = {
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
LLAMA_70B: Final = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN3_06B: Final = {
    **LLAMA_8B,
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
MIXTRAL: Final = {
    **LLAMA_8B,
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "sliding_window": None,
}
DEEPSEEK_V3: Final = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}

#: Operations that only return memory or a view, and launch nothing on the device.
_NO_LAUNCH: Final = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_pin_memory"}
_NO_LAUNCH_EITHER: Final = {"detach", "lift_fresh", "_unsafe_view", "_reshape_alias"}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a torch.distributed backend.

    Attributes:
        shape, dtype: of the tensor that is sent.
        peer: the other rank of a point-to-point call.
    """

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    peer: int | None = None


class DeviceTrace(HostFunctions):
    """Records the operations on a device, and refuses reads by the host.

    Attributes:
        calls: communication between ranks, in order.
        launches: names of what runs on the device: torch's operations, and Triton's kernels if `launched` is called for
            them.
        uploads: copies from the host.
        peak: largest number of bytes of tensors created since the start of the trace.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.launches: Counter[str] = Counter()
        self.uploads = 0
        self.peak = self._held = 0
        self._storages: dict[int, int] = {}  # number of tensors per storage
        self._existing: dict[int, StorageWeakRef] = {}  # storages older than the trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        arguments = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        name = func._opname
        if func.namespace == "stoker":
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "c10d":
            tensor = arguments[-1]  # the input; `given` starts with the outputs
            peer = args[2] if name.strip("_") in ("send", "recv") else None
            self.calls.append(Call(name.strip("_"), tuple(tensor.shape), tensor.dtype, peer))
        if name == "_pin_memory":
            return args[0]
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        for each in arguments:
            if (key := _storage(each)) not in self._storages:
                self._existing[key] = StorageWeakRef(each.untyped_storage())
        result = func(*args, **(kwargs or {}))
        made = [each for each in torch.utils._pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
        self._check(func, arguments, made)
        on_device = any(each.device.type == "cuda" for each in (*arguments, *made))
        if on_device and not func.is_view and name not in _NO_LAUNCH | _NO_LAUNCH_EITHER and func.namespace != "c10d":
            from_host = any(each.device.type == "cpu" and each.dim() for each in arguments)
            self.uploads += from_host
            self.launches[name] += not from_host
        for tensor in made:
            if isinstance(tensor, FakeTensor):
                tensor.constant = None  # values copied from the host become unknown
            if tensor.device.type == "cuda":
                self._hold(tensor)
        return result

    def launched(self, kernel: Any, key: str) -> None:
        """See `compile_only`."""
        self.launches[f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"] += 1

    def _check(self, func: Any, arguments: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        from_device = any(each.device.type == "cuda" for each in arguments)
        from_host = any(each.device.type == "cpu" and each.dim() for each in arguments)
        to_host = any(each.device.type == "cpu" for each in made)
        to_device = any(each.device.type == "cuda" for each in made)
        assert not (from_device and to_host), f"{func} reads the device"
        if "index_put" in func._opname and from_device:  # the host waits even for the copy of a number
            assert all(each.device.type == "cuda" for each in arguments), f"{func} copies from the host"
        if from_host and (from_device or to_device):
            assert _called_by(transfer.__file__), f"{func} has the device read the host"

    def _hold(self, tensor: torch.Tensor) -> None:
        key, size = _storage(tensor), tensor.untyped_storage().nbytes()
        if key in self._existing and not self._existing[key].expired():
            return
        if key not in self._storages:
            self._storages[key] = 0
            self._held += size
            self.peak = max(self.peak, self._held)
        self._storages[key] += 1
        weakref.finalize(tensor, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._storages[key] -= 1
        if not self._storages[key]:
            del self._storages[key]
            self._held -= size


def bytes_on_device() -> int:
    """Return the bytes of all existing tensors."""
    gc.collect()
    # Checks the type, not the object: some objects are proxies of deleted ones.
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = {_storage(each): each.untyped_storage().nbytes() for each in tensors if each.device.type == "cuda"}
    return sum(storages.values())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _called_by(path: str) -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == path:
            return True
    return False


@dataclasses.dataclass(frozen=True)
class NoWeights:
    """Loader of models without files.

    Attributes:
        quantization: value of ``--quantization``, or GGUF's type of all matrices.
        stated: quantization that config.json states; None: the weights are unquantized.
    """

    quantization: str | None = None
    stated: QuantizationConfig | None = None

    def load(self, config: ModelConfig, build: Any, device: torch.device, max_model_len: int, _: Any) -> Decoder:
        formats = self.weight_formats(config)
        with device:
            linear = with_formats(formats, build.linear)
            model = Decoder(config, dataclasses.replace(build, linear=linear), max_model_len)
        settle(model)
        return model

    def weight_formats(self, config: ModelConfig, *_: Any) -> WeightFormats:
        if self.stated is not None:
            return stated_formats(config, self.stated)
        if self.quantization is None:
            return ALL_NUMBERS
        if self.quantization in GGUF_FORMATS:
            names = (f"{module}.weight" for module, _ in matrices(config, first_expert))
            return formats_on_gpus(WeightFormats.of(dict.fromkeys(names, GGUF_FORMATS[self.quantization])))
        return on_load_formats(config, self.quantization, on_cpu=False)

    def kv_scales(self, *_: Any) -> dict[int, Any]:
        return {}


def checkpoint(config: Mapping[str, Any], quantization: str | None = None) -> Checkpoint:
    """Create a checkpoint without files."""
    loader = NoWeights(quantization, read_quantization(dict(config)))
    return Checkpoint(Path("m"), ModelConfig.from_dict(dict(config)), ModelCard(), loader)


@contextmanager
def fake_device(
    monkeypatch: pytest.MonkeyPatch, memory_bytes: int = 80 * GIB, graphs: bool = False
) -> Iterator[list[tuple[int, ...]]]:
    """Simulate `cuda` as an accelerator whose tensors have only shapes. Yield the shapes of the host's reads.

    Args:
        graphs: steps use CUDA graphs; each replay recomputes the graph's steps.
    """
    reads: list[tuple[int, ...]] = []

    def zeros(tensor: torch.Tensor) -> Any:
        reads.append(tuple(tensor.shape))
        number = True if tensor.dtype == torch.bool else 0  # conditions hold
        return functools.reduce(lambda inner, size: [inner] * size, reversed(tensor.shape), number)

    # In inference mode, fake tensors do not see how an operation is composed, and would run some for real.
    inference_mode = torch.inference_mode
    monkeypatch.setattr(torch, "inference_mode", lambda *mode: inference_mode(*mode) if mode else torch.no_grad())
    monkeypatch.setattr(build_runner, "KVCachePool", kv_cache.KVCachePool)  # unguarded: fake tensors have no memory
    monkeypatch.setattr(build_runner, "capture_all", _compute_again if graphs else lambda *_: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(build_runner, "resolve_device", lambda args: torch.device("cuda"))
    monkeypatch.setattr(kv_cache, "memory_bytes", lambda device, sharers: memory_bytes)
    monkeypatch.setattr(kv_cache, "device_name", lambda device: "a fake device")

    def copied(copy: transfer.HostCopy, tensor: torch.Tensor) -> None:
        copy.values = lambda: zeros(tensor)  # type: ignore[method-assign]

    monkeypatch.setattr(transfer.HostCopy, "__init__", copied)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield reads


def _compute_again(
    steps: StepGraphs,
    sampling: SamplingGraphs | None,
    planned_bytes: int,
    on_progress: Callable[[], None],
    ranks: Communicator,
) -> bool:
    def capture(compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        def replay() -> None:
            compute()

        return compute(), replay

    steps.capture(capture, on_progress)
    if sampling is not None:
        sampling.capture(capture, on_progress)
    return True


def prompts(
    *lengths: int,
    greedy: bool = True,
    grammar: Grammar | None = None,
    adapter_slot: int = NO_ADAPTER,
    decoding: Sequence[int] = (),
    **params: Any,
) -> Step:
    """Create a step with prompts of these lengths, one block per sequence in the tables.

    Args:
        adapter_slot: slot of the last prompt's adapter.
        decoding: positions of the tokens that the first rows compute; the prompts are in the rows after them.
    """
    sampling = SamplingParams(**({"temperature": 0} if greedy else {"temperature": 0.7, "logprobs": 2}) | params)
    new = [
        NewSequence(row, EngineRequest(str(row), [1] * length, sampling, 5, row, grammar=grammar), 0, [], [[1 + row]])
        for row, length in enumerate(lengths, len(decoding))
    ]
    new[-1] = dataclasses.replace(new[-1], adapter_slot=adapter_slot)
    rows = array("i", range(len(decoding) + len(lengths)))
    starts, of_each = [*decoding, *[0] * len(lengths)], [*[1] * len(decoding), *lengths]
    ones = array("i", [1] * len(rows))
    return Step(0, rows, array("i", starts), array("i", of_each), ones, len(decoding), sum(of_each), new=new)


def decodes(*positions: int) -> Step:
    """Create a step in which each sequence computes one token."""
    rows = array("i", range(len(positions)))
    ones = array("i", [1] * len(rows))
    return Step(1, rows, array("i", positions), ones, ones, len(rows), len(rows))


def verified(*positions: int, draft: int) -> Step:
    """Create a step in which each sequence computes one token and `draft` draft tokens."""
    rows = array("i", range(len(positions)))
    lengths = array("i", [1 + draft] * len(rows))
    drafts = [Draft(row, [1] * draft) for row in rows]
    ones = array("i", [1] * len(rows))
    return Step(1, rows, array("i", positions), lengths, ones, 0, sum(lengths), drafts=drafts)
