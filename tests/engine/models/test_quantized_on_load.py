"""``--quantization int8|int4|fp8`` equals a model whose matrices were quantized, dequantized and saved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from gguf import GGMLQuantizationType
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from stoker_common.errors import ArgumentError, WeightsError
from stoker_engine.architectures.quantization.on_load import ON_LOAD, formats_on_load, is_quantized
from stoker_engine.attention.select import attention_backend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.kernels import blocks
from stoker_engine.kernels.group_blocks import dequantize, quantize
from stoker_engine.kernels.select import select_kernels
from stoker_engine.layers.build import Build
from stoker_engine.llm import LLM
from stoker_engine.models.checkpoint import Checkpoint, find_checkpoint
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.loading import quantized_on_load
from stoker_engine.parallel.communicator import Communicator, SingleRank
from stoker_engine.quant.blocks import BlockMatrix
from stoker_engine.quant.weight_target import WeightTarget
from stoker_engine.sizing.method_on_load import method_on_load
from stoker_engine.sizing.weight_sizes import weight_bytes

from ...support.engine.served import served
from ...support.engine.tiny_configs import GGUF, SIZES
from ...support.engine.tiny_models import random_model, reference_of, save_model, tiny_gguf
from . import llama_cpp

#: Rows are no multiples of 32. GPT-2's and DBRX's matrices are transposed; some tensors hold several matrices.
FAMILIES = (
    "llama", "llama biases", "gpt2", "gpt_neox", "phi3", "falcon 7b", "mixtral", "qwen2_moe", "deepseek_v2 groups",
    "deepseek_v3", "dbrx", "granitemoe",
)  # fmt: skip
_STAYS: Final = ("embed", "wte", "wpe", "lm_head", "gate.weight", "shared_expert_gate", "kv_b_proj")
CPU: Final = torch.device("cpu")


def _load(checkpoint: Checkpoint, ranks: Communicator | None = None) -> Decoder:
    dtype = torch.float32
    build = Build(dtype, attention_backend(CPU, served(dtype)), select_kernels(CPU, dtype), ranks or SingleRank())
    model = checkpoint.load(build, CPU, 128)
    assert isinstance(model, Decoder)
    return model


def _resident(model: Decoder) -> int:
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


def _elements(target: WeightTarget) -> torch.Tensor:
    if target.stored is None:
        return target.tensor
    return blocks.dequantize(target.tensor, target.stored, target.inner, torch.float32)


class _Divisions(TorchDispatchMode):
    """Refuses divisions by numbers that are not on the device, which GPUs round twice, and reads by the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        divides = func._opname in ("div", "div_", "true_divide", "reciprocal")
        assert not divides or all(isinstance(each, torch.Tensor) and each.device.type == "cuda" for each in args)
        assert func._opname not in ("_local_scalar_dense", "item")
        return func(*args, **(kwargs or {}))


def test_matrices_are_quantized_on_their_device_by_the_same_arithmetic() -> None:
    for format in (*ON_LOAD.values(), *formats_on_load("fp8", on_cpu=False).values()):
        weights = torch.randn(6, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
        expected = quantize(weights, format)
        with FakeTensorMode(), _Divisions():
            found = quantize(torch.empty(6, 96, dtype=torch.bfloat16, device="cuda"), format)
        assert (found.device.type, found.shape) == ("cuda", expected.shape)


@pytest.mark.parametrize("elements", [1, 100, 192, 1 << 20])
def test_rows_are_quantized_some_at_a_time(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_on_load, "_ELEMENTS", elements)
    stack = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    for weights in (stack, stack.transpose(0, 1), stack[0]):
        found = quantized_on_load.quantized("m", weights, ON_LOAD["int4"], CPU)
        assert torch.equal(found, quantize(weights, ON_LOAD["int4"]))
    stack[2, 4, 5] = torch.inf
    with pytest.raises(WeightsError, match="m holds nan or infinity"):
        quantized_on_load.quantized("m", stack, ON_LOAD["int4"], CPU)


@pytest.mark.parametrize("method", ON_LOAD)
@pytest.mark.parametrize("name", FAMILIES)
def test_only_matrices_are_quantized(name: str, method: str, tmp_path: Path) -> None:
    tiny_gguf(name).save_pretrained(tmp_path)
    plain = find_checkpoint(EngineArgs(model=str(tmp_path)))
    checkpoint = find_checkpoint(EngineArgs(model=str(tmp_path), quantization=method))
    before, model = _load(plain).weight_targets(), _load(checkpoint)
    formats = checkpoint.weight_formats(torch.float32, CPU)
    quantized = 0
    for param_name, found in model.weight_targets().items():
        if is_quantized(param_name):
            quantized += 1
            assert found.stored == ON_LOAD[method] == formats.stored(param_name)
            assert torch.equal(found.tensor, quantize(before[param_name].tensor, ON_LOAD[method])), param_name
        else:
            assert found.stored is None and formats.stored(param_name) is None
            assert torch.equal(found.tensor, before[param_name].tensor), param_name
    assert quantized >= 2 * 4
    assert _resident(model) == weight_bytes(checkpoint.config, 4, formats=formats)


@pytest.mark.parametrize("method", ON_LOAD)
@pytest.mark.parametrize("name", ["llama", "llama biases", "gpt2", "qwen2_moe", "deepseek_v3"])
def test_quantized_model_equals_the_dequantized_one(
    name: str, method: str, tmp_path: Path, paged_run: Any, assert_run: Any
) -> None:
    theirs = tiny_gguf(name)
    theirs.save_pretrained(tmp_path)
    model = _load(find_checkpoint(EngineArgs(model=str(tmp_path), quantization=method)))
    stored = ON_LOAD[method]
    with torch.inference_mode():
        for parameter, weights in theirs.named_parameters():
            if weights.dim() < 2 or any(part in parameter for part in _STAYS):
                continue
            rows = weights.data.T if "attn.c_" in parameter or "mlp.c_" in parameter else weights.data
            rows.copy_(dequantize(quantize(rows.contiguous(), stored), stored, rows.shape[-1], torch.float32))

    prompts = [
        torch.randint(2, 128, (size,), generator=torch.Generator().manual_seed(size)).tolist() for size in (37, 5)
    ]
    assert_run(paged_run(model, prompts, new_tokens=16), reference_of(theirs))


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2_moe", "deepseek_v3"])
def test_ranks_hold_parts_of_the_quantized_matrices(name: str, tmp_path: Path) -> None:
    kind, options = GGUF[name]
    wide = {"hidden_size": 64, "n_embd": 64, "intermediate_size": 96, "moe_intermediate_size": 96, "v_head_dim": 16}
    options = {**options, **{key: value for key, value in wide.items() if key in options}}
    random_model(kind, options).save_pretrained(tmp_path)
    before = _load(find_checkpoint(EngineArgs(model=str(tmp_path)))).weight_targets()
    checkpoint, stored = find_checkpoint(EngineArgs(model=str(tmp_path), quantization="int4")), ON_LOAD["int4"]
    largest, cut = 0, 0
    for rank in range(2):
        model = _load(checkpoint, ranks=Rank(rank))
        largest = max(largest, _resident(model))
        for param_name, found in model.weight_targets().items():
            whole = before[param_name].tensor
            part = found.part_of(whole)
            cut += is_quantized(param_name) and part.shape[-1] < whole.shape[-1]
            assert torch.equal(found.tensor, quantize(part, stored) if is_quantized(param_name) else part), param_name
    assert cut >= 2 * 2 * 2
    assert largest == weight_bytes(checkpoint.config, 4, 2, formats=checkpoint.weight_formats(torch.float32, CPU))


@dataclass(frozen=True)
class Rank(SingleRank):
    """One of two ranks, which only loads."""

    rank: int
    size: int = 2


@pytest.mark.parametrize("method", ON_LOAD)
def test_engine_output_in_bfloat16_equals_that_of_rounded_weights(method: str, tmp_path: Path) -> None:
    """Outputs equal those of a checkpoint with the rounded values."""
    theirs = random_model("llama", {**SIZES, "vocab_size": 512}).bfloat16()
    save_model(tmp_path / "model", theirs)
    stored = ON_LOAD[method]
    with torch.inference_mode():
        for parameter, weights in theirs.named_parameters():
            if "_proj" in parameter:
                weights.copy_(dequantize(quantize(weights, stored), stored, weights.shape[-1], torch.bfloat16))
    save_model(tmp_path / "rounded", theirs)
    prompts = [[7, 8, 9] * 5, [300]]
    outputs = [
        LLM(str(folder), num_gpu_blocks_override=64, **given).generate(
            prompts, SamplingParams(max_tokens=20, temperature=0.0)
        )
        for folder, given in ((tmp_path / "model", {"quantization": method}), (tmp_path / "rounded", {}))
    ]
    tokens = [[each.outputs[0].token_ids for each in output] for output in outputs]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_unquantized_gguf_files_are_quantized(kind: str, tmp_path: Path) -> None:
    theirs = tiny_gguf("qwen2_moe")
    path = llama_cpp.write(theirs, tmp_path / "model.gguf", stored=lambda name: GGMLQuantizationType[kind])
    before = _load(find_checkpoint(EngineArgs(model=str(path)))).weight_targets()
    checkpoint = find_checkpoint(EngineArgs(model=str(path), quantization="int8"))
    model = _load(checkpoint)
    for param_name, found in model.weight_targets().items():
        if is_quantized(param_name):
            assert torch.equal(found.tensor, quantize(_elements(before[param_name]), ON_LOAD["int8"])), param_name
        else:
            assert found.stored == before[param_name].stored
            assert torch.equal(found.tensor, before[param_name].tensor), param_name
    formats = checkpoint.weight_formats(torch.float32, CPU)
    assert _resident(model) == weight_bytes(checkpoint.config, 4, formats=formats)


def test_quantized_checkpoints_are_not_quantized_again(tiny_llama: Path, demo_gguf: Path, tmp_path: Path) -> None:
    def refused(model: Path, method: str, message: str) -> None:
        with pytest.raises(ArgumentError, match=message):
            find_checkpoint(EngineArgs(model=str(model), quantization=method))

    refused(demo_gguf, "int8", "int8 is requested, but the checkpoint is already quantized by Q")
    assert find_checkpoint(EngineArgs(model=str(demo_gguf), quantization="gguf")).loader.on_load is None
    refused(tiny_llama, "fp8_per_tensor", "fp8_per_tensor is requested.*loading are int8, int4, fp8")
    refused(tiny_llama, "gptq", "gptq is requested, but the checkpoint is not quantized")
    assert method_on_load("gptq_marlin", "gptq") is None
    assert method_on_load("fp8", "fp8") is None
    with pytest.raises(ArgumentError, match="int8 is requested, but the checkpoint is already quantized by awq"):
        method_on_load("int8", "awq")
    with pytest.raises(ArgumentError, match="int8_per_channel_weight_only is requested, but the checkpoint is"):
        method_on_load("int8_per_channel_weight_only", "fp8")


def test_models_of_the_transformers_backend_are_not_quantized(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["persimmon"](
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    find_checkpoint(EngineArgs(model=str(tmp_path)))
    with pytest.raises(ArgumentError, match="PersimmonForCausalLM runs on the Transformers backend"):
        find_checkpoint(EngineArgs(model=str(tmp_path), quantization="int8"))


@pytest.mark.parametrize(
    "name, tensor", [("llama", "model.layers.1.mlp.up_proj.weight"), ("gpt2", "transformer.h.1.mlp.c_fc.weight")]
)
def test_nan_weights_are_refused(name: str, tensor: str, tmp_path: Path) -> None:
    theirs = tiny_gguf(name)
    theirs.get_parameter(tensor).data[3, 4] = torch.nan
    theirs.save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match=rf"{tensor} holds nan or infinity: the file is damaged"):
        _load(find_checkpoint(EngineArgs(model=str(tmp_path), quantization="int4")))


@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "llama biases", "phi3"])
def test_packed_matrices_are_close_to_unpacked_ones(name: str, method: str, tmp_path: Path, paged_run: Any) -> None:
    """Results do not depend on a prompt's chunks."""
    kernels = select_kernels(CPU, torch.bfloat16)
    if kernels.block_panels is None:
        pytest.skip("this ISA has no panels")
    kind, options = GGUF[name]
    random_model(kind, {**options, "hidden_size": 64, "intermediate_size": 96}).save_pretrained(tmp_path)
    checkpoint = find_checkpoint(EngineArgs(model=str(tmp_path), quantization=method))
    backend = attention_backend(CPU, served(torch.bfloat16))
    models = [
        checkpoint.load(Build(torch.bfloat16, backend, each, SingleRank()), CPU, 128)
        for each in (kernels, replace(kernels, block_panels=None))
    ]
    packed, rows = ([each.is_packed for each in model.modules() if isinstance(each, BlockMatrix)] for model in models)
    assert all(packed) and len(packed) >= 4 and not any(rows)
    prompts = [[5, 100, 2, 77], list(range(2, 63))]
    whole, parts, expected = (
        paged_run(model, prompts, new_tokens=6, chunks=chunks, dtype=torch.bfloat16).sequences
        for model, chunks in ((models[0], (64,)), (models[0], (1, 3, 7)), (models[1], (64,)))
    )
    for prompt, one, other, near in zip(prompts, whole, parts, expected, strict=True):
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))
        got, exact = (torch.stack(sequence.logits[: len(prompt)]) for sequence in (one, near))
        assert (got - exact).norm() <= 0.1 * exact.norm()
