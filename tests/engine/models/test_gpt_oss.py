"""gpt-oss as on the hub: experts in MXFP4, config.json in the hub's spelling. The reference is transformers' model with
the blocks dequantized by its own code.

The hidden size is that of an expert, as in gpt-oss-20b: even a transposed matrix has the right shape.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from stoker_common.errors import ModelError, WeightsError
from stoker_engine import LLM, SamplingParams
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.quantization.read import read_quantization
from stoker_engine.architectures.stored_formats import GroupFormat
from stoker_engine.attention.select import attention_backend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.kernels import select
from stoker_engine.kernels.blocks import dequantize
from stoker_engine.kernels.cpu.library import library
from stoker_engine.layers.build import Build
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.models.decoder import Decoder
from stoker_engine.parallel.communicator import Communicator, SingleRank
from stoker_engine.sizing.planned_formats import stated_formats
from stoker_engine.sizing.weight_sizes import weight_bytes

from ...support.engine.served import served
from ...support.engine.tiny_models import randomized, reference_of

CPU = torch.device("cpu")
EXPERTS, SIZE, LAYERS = 4, 64, 3
#: Like that of openai/gpt-oss-20b, except for the sizes.
CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 1,
    "experts_per_token": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": SIZE,
    "initial_context_length": 64,
    "initializer_range": 0.02,
    "intermediate_size": SIZE,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "max_position_embeddings": 2048,
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "num_local_experts": EXPERTS,
    "output_router_logits": False,
    "pad_token_id": 0,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 64,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 20,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 320,
}


def _experts(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A layer's experts in MXFP4."""

    def blocks(outputs: int) -> torch.Tensor:
        return torch.randint(0, 256, (EXPERTS, outputs, SIZE // 32, 16), generator=generator, dtype=torch.uint8)

    def scales(outputs: int) -> torch.Tensor:
        return torch.randint(119, 124, (EXPERTS, outputs, SIZE // 32), generator=generator, dtype=torch.uint8)

    return {
        "gate_up_proj_blocks": blocks(2 * SIZE),
        "gate_up_proj_scales": scales(2 * SIZE),
        "gate_up_proj_bias": torch.randn(EXPERTS, 2 * SIZE, generator=generator),
        "down_proj_blocks": blocks(SIZE),
        "down_proj_scales": scales(SIZE),
        "down_proj_bias": torch.randn(EXPERTS, SIZE, generator=generator),
    }


def _save(folder: Path, change: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Write the checkpoint; return transformers' model with the dequantized weights."""
    given = CONFIG | (change or {})
    stated = {key: value for key, value in given.items() if key not in ("quantization_config", "architectures")}
    torch.manual_seed(0)
    config = CONFIG_MAPPING["gpt_oss"](**stated)
    theirs = randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    for parameter in theirs.parameters():
        parameter.data = parameter.data.to(dtype).float()
    generator = torch.Generator().manual_seed(1)
    stored = {name: tensor for name, tensor in theirs.state_dict().items() if ".experts." not in name}
    for index, layer in enumerate(theirs.model.layers):
        parts = _experts(generator)
        for name, tensor in parts.items():
            stored[f"model.layers.{index}.mlp.experts.{name}"] = tensor
        for name in ("gate_up_proj", "down_proj"):
            packed = parts[f"{name}_blocks"], parts[f"{name}_scales"]
            getattr(layer.mlp.experts, name).data = convert_moe_packed_tensors(*packed, dtype=torch.float32)
            getattr(layer.mlp.experts, f"{name}_bias").data = parts[f"{name}_bias"].to(dtype).float()
    tensors = {
        name: tensor.contiguous() if tensor.dtype == torch.uint8 else tensor.to(dtype).contiguous()
        for name, tensor in stored.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(given))
    return theirs


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> tuple[Path, PreTrainedModel]:
    """A folder, and the reference."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    theirs = _save(folder)
    for file in tiny_llama.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder, theirs


def _decoder(folder: Path, ranks: Communicator | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    build = Build(
        dtype, attention_backend(CPU, served(dtype)), select.select_kernels(CPU, dtype), ranks or SingleRank()
    )
    model = find_checkpoint(EngineArgs(str(folder))).load(build, CPU, max_model_len=256)
    assert isinstance(model, Decoder)
    return model


def _prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 320) for _ in range(length)] for length in lengths]


def test_decoder_equals_transformers(saved: tuple[Path, PreTrainedModel], paged_run: Any, assert_run: Any) -> None:
    folder, theirs = saved
    ours = _decoder(folder)
    stored = {name: target.stored for name, target in ours.weight_targets().items() if target.stored is not None}
    assert stored == {
        f"layers.{layer}.experts.{expert}.{part}.weight": GroupFormat("fp4", 32, "e8m0")
        for layer in range(LAYERS) for expert in range(EXPERTS) for part in ("gate", "up", "down")
    }  # fmt: skip

    assert_run(paged_run(ours, _prompts(1, 61, 9, 30, 1), new_tokens=40), reference_of(theirs))


def test_planned_bytes_equal_the_allocated_ones(saved: tuple[Path, PreTrainedModel]) -> None:
    folder, _ = saved
    quantization = read_quantization(CONFIG)
    assert quantization is not None
    config = ModelConfig.from_dict(CONFIG)
    planned = stated_formats(config, quantization)
    assert find_checkpoint(EngineArgs(str(folder))).weight_formats(torch.bfloat16, CPU) == planned
    for dtype in (torch.float32, torch.bfloat16):
        for size in (1, 2):
            ranks = [_decoder(folder, _Rank(rank, size), dtype) for rank in range(size)]
            held = [sum(target.tensor.nbytes for target in each.weight_targets().values()) for each in ranks]
            assert held == [weight_bytes(config, dtype.itemsize, tensor=size, formats=planned)] * size


class _Rank(SingleRank):
    """One of several ranks, which never communicate."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def test_ranks_hold_their_shards(saved: tuple[Path, PreTrainedModel]) -> None:
    folder, _ = saved
    whole = _decoder(folder).weight_targets()

    def elements(target: Any) -> torch.Tensor:
        if target.stored is None:
            return target.tensor  # type: ignore[no-any-return]
        return dequantize(target.tensor, target.stored, target.inner, torch.float32)

    for rank in (0, 1):
        shares = _decoder(folder, _Rank(rank, 2)).weight_targets()
        assert {"layers.0.sinks", "layers.1.experts.2.up.bias"} <= {n for n, s in shares.items() if s.shard is not None}
        for name, target in shares.items():
            assert torch.equal(elements(target), target.part_of(elements(whole[name]))), name


def test_ranks_that_cannot_share_heads_or_blocks_are_refused(saved: tuple[Path, PreTrainedModel]) -> None:
    with pytest.raises(ModelError, match="8 attention heads"):
        _decoder(saved[0], _Rank(0, 3))
    with pytest.raises(ModelError, match="a dimension of 64 at multiples of 32"):
        _decoder(saved[0], _Rank(3, 4))


@pytest.mark.parametrize("logprobs", [0, 4])
def test_engine_output_equals_transformers(saved: tuple[Path, PreTrainedModel], logprobs: int) -> None:
    """Prompts are chunked and preempted, hit a prefix, and have n > 1; all are longer than the window."""
    folder, theirs = saved
    prompts = _prompts(2, 70, 21, 3, 64)
    # Room for one of the longest and little more.
    llm = LLM(str(folder), max_model_len=128, max_num_batched_tokens=32, block_size=16, num_gpu_blocks_override=22)
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=logprobs)
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    assert llm.engine.scheduler.num_preemptions > 0
    again = [*prompts[0], *outputs[0].outputs[0].token_ids[:20]]
    several = SamplingParams(temperature=1.5, seed=3, n=3, max_tokens=20, ignore_eos=True, logprobs=logprobs)
    outputs += llm.generate([again], several, use_tqdm=False)
    assert len(outputs[-1].outputs) == 3
    for index, (prompt, output) in enumerate(zip([*prompts, again], outputs, strict=True)):
        for choice in output.outputs:
            tokens = list(choice.token_ids)
            with torch.inference_mode():
                logits = theirs(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1)
            if index < len(prompts):
                chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
                assert (logits.max(-1).values - chosen).max() <= 1e-3
            assert choice.logprobs is not None
            for position, by_token in enumerate(choice.logprobs):
                for token, logprob in by_token.items():
                    assert logprob.logprob == pytest.approx(float(expected[position, token]), abs=1e-4)


def test_bfloat16_errors_are_no_larger_than_those_of_transformers(tmp_path: Path, paged_run: Any) -> None:
    """Compared with the float32 model of these weights. With CPU kernels, bits do not depend on the batch."""
    theirs = _save(tmp_path, dtype=torch.bfloat16)
    prompts = _prompts(3, 61, 9, 30, 1)
    model = _decoder(tmp_path, dtype=torch.bfloat16)
    run = paged_run(model, prompts, new_tokens=8, dtype=torch.bfloat16).sequences
    sequences = [(torch.tensor([each.tokens[:-1]]), torch.stack(each.logits)) for each in run]
    with torch.inference_mode():
        exact = [theirs(tokens).logits[0] for tokens, _ in sequences]
        rounded = [theirs.bfloat16()(tokens).logits[0].float() for tokens, _ in sequences]

    def error(got: list[torch.Tensor]) -> float:
        return float(torch.cat([(a - b).abs().flatten() for a, b in zip(got, exact, strict=True)]).mean())

    assert error([logits for _, logits in sequences]) <= 1.1 * error(rounded)
    if library() is not None:
        for index, prompt in enumerate(prompts):
            alone = paged_run(model, [prompt], new_tokens=8, seed=index + 1, dtype=torch.bfloat16).sequences[0]
            assert torch.equal(torch.stack(alone.logits), torch.stack(run[index].logits))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"gate_up_proj_scales": None}, "has no scales"),
        ({"down_proj_bias": None}, r"lack 4 tensors.*experts\.0\.down\.bias"),
        ({"gate_up_proj_blocks": torch.zeros(EXPERTS, 2 * SIZE - 1, 2, 16, dtype=torch.uint8)}, "needs"),
        ({"gate_up_proj_bias": torch.zeros(EXPERTS, 2 * SIZE - 1)}, "the model needs"),
        ({"gate_up_proj_bias": torch.zeros(EXPERTS - 1, 2 * SIZE)}, "6 weights, but the model needs 8"),
        ({"down_proj_bias": torch.zeros(EXPERTS + 1, SIZE)}, "5 rows, but the model needs 4"),
        ({"down_proj_bias": torch.full((EXPERTS, SIZE), torch.nan)}, "nan or infinity"),
        ({"down_proj_scales": torch.full((EXPERTS, SIZE, 2), 255, dtype=torch.uint8)}, "nan or infinity"),
        ({"down_proj": torch.zeros(EXPERTS, SIZE, SIZE)}, "twice"),
        ({"sinks": torch.zeros(7)}, "sinks has shape"),
        ({"sinks": torch.full((8,), torch.inf)}, "nan or infinity"),
    ],
)
def test_damaged_files_are_refused(
    damage: dict[str, torch.Tensor | None], message: str, saved: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    shutil.copy(saved[0] / "config.json", tmp_path)
    tensors = load_file(saved[0] / "model.safetensors")
    for part, tensor in damage.items():
        name = f"model.layers.1.{'self_attn' if part == 'sinks' else 'mlp.experts'}.{part}"
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=message):
        _decoder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"swiglu_limit": 0}, "swiglu_limit"),
        ({"swiglu_limit": "seven"}, "swiglu_limit"),
        ({"swiglu_alpha": [1]}, "swiglu_alpha"),
        ({"num_local_experts": 0}, "num_local_experts"),
        ({"num_experts_per_tok": 5}, "5 experts per token are more than the 4 experts"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1"),
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention is not supported"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 1}}, "at least 2"),
    ],
)
def test_invalid_configs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_dict(CONFIG | change)


def test_config_defaults_equal_those_of_transformers() -> None:
    theirs = CONFIG_MAPPING["gpt_oss"]()
    defaults = ModelConfig.from_dict({"architectures": ["GptOssForCausalLM"]})
    assert (
        defaults.decoder == ModelConfig.from_dict({**theirs.to_dict(), "architectures": ["GptOssForCausalLM"]}).decoder
    )
    assert defaults.vocab_size == theirs.vocab_size and defaults.longest_model_len == theirs.max_position_embeddings


def unquantized(folder: Path) -> PreTrainedModel:
    """Write a random checkpoint that is not quantized."""
    torch.manual_seed(0)
    stated = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    theirs: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt_oss"](**stated)).float()
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize("method", ["int8", "fp8"])
def test_experts_are_quantized_on_load(method: str, tmp_path: Path) -> None:
    theirs = unquantized(tmp_path)
    build = Build(
        torch.float32, attention_backend(CPU, served(torch.float32)), select.select_kernels(CPU, torch.float32)
    )
    model = find_checkpoint(EngineArgs(str(tmp_path), quantization=method)).load(build, CPU, max_model_len=256)
    assert isinstance(model, Decoder)
    experts = theirs.model.layers[1].mlp.experts
    for part, elements in (
        ("gate", experts.gate_up_proj[2, :, ::2].T),
        ("up", experts.gate_up_proj[2, :, 1::2].T),
        ("down", experts.down_proj[2].T),
    ):
        target = model.weight_targets()[f"layers.1.experts.2.{part}.weight"]
        assert target.stored is not None
        got = dequantize(target.tensor, target.stored, target.inner, torch.float32)
        assert (got - elements).abs().max() <= 0.05 * elements.abs().max()
