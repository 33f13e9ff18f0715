"""Whole models: a quantized checkpoint answers as one of its dequantized numbers in float32 does, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from stoker_common.errors import ModelError, WeightsError
from stoker_engine import LLM, SamplingParams
from stoker_engine.architectures.stored_formats import LARGEST_GROUP, GroupFormat
from stoker_engine.attention.select import attention_backend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.kernels import select
from stoker_engine.kernels.blocks import dequantize
from stoker_engine.layers.build import Build
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.models.decoder import Decoder
from stoker_engine.parallel.communicator import Communicator, SingleRank
from stoker_engine.sizing.weight_sizes import weight_bytes

from ...support.engine.served import served
from .compressed import Compressed, with_columns_shuffled

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "llama wide": {**_SIZES, "intermediate_size": 128},
    "llama tied": {**_SIZES, "tie_word_embeddings": True},
    "qwen2": _SIZES,
    "phi3": _SIZES,
    "mixtral": {**_SIZES, "num_local_experts": 4},
    "granitemoe": {**_SIZES, "num_local_experts": 4},  # stacks, by the names of modules
    "deepseek_v3": {
        **_SIZES,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
}

#: What stays as numbers.
_NUMBERS = re.compile(r"norm|embed_tokens|lm_head|mlp\.gate\.weight|block_sparse_moe\.gate\.weight|router|bias")

#: A matrix → its tensors by the ends of their names, what it means in float32, and the ``quantization_config``.
Quantized = tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]


def _compressed(**case: Any) -> Callable[[torch.Tensor], Quantized]:
    def quantized(weight: torch.Tensor) -> Quantized:
        made = Compressed(weight=weight, **case)
        stated = made.stated(ignore=["lm_head", "re:.*\\.gate$"], quantization_status="compressed")
        return made.tensors, made.decompressed(), stated

    return quantized


def _each(method: Callable[[torch.Tensor], Quantized], weight: torch.Tensor) -> Quantized:
    """Of a matrix, or of each of a stack."""
    if weight.dim() == 2:
        return method(weight)
    made = [method(matrix) for matrix in weight]
    parts = {end: torch.stack([tensors[end] for tensors, _, _ in made]) for end in made[0][0]}
    return parts, torch.stack([numbers for _, numbers, _ in made]), made[0][2]


def _in_order_of_groups(weight: torch.Tensor) -> Quantized:
    made = Compressed(_W4, weight=weight)
    tensors, order = with_columns_shuffled(made, 32)
    numbers = torch.empty_like(weight)
    numbers[:, order] = made.decompressed()
    stated = made.stated()
    stated["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    return tensors, numbers, stated


def _everything(weight: torch.Tensor) -> Quantized:
    tensors, numbers, stated = _compressed(weights=_W4)(weight)
    stated["config_groups"]["group_0"]["targets"] = ["Linear", "Embedding"]
    return tensors, numbers, stated | {"ignore": []}


def _fp8(high: int, wide: int) -> Callable[[torch.Tensor], Quantized]:
    """In blocks as DeepSeek's, of another size."""

    def quantized(weight: torch.Tensor) -> Quantized:
        made = Compressed(
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [high, wide]},
            format="float-quantized",
            scale_dtype=torch.float32,
            weight=weight,
        )
        tensors = {"weight": made.tensors["weight"], "weight_scale_inv": made.tensors["weight_scale"]}
        stated = {"quant_method": "fp8", "weight_block_size": [high, wide], "activation_scheme": "dynamic"}
        return tensors, made.decompressed(), stated

    return quantized


def _fp8_by_tensor(weight: torch.Tensor) -> Quantized:
    scale = weight.abs().amax() / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    stated = {"quant_method": "fp8", "activation_scheme": "static"}
    tensors = {"weight": numbers, "weight_scale": scale, "input_scale": torch.tensor(0.01)}
    return tensors, numbers.float() * scale, stated


def _fp8_in_one_block(weight: torch.Tensor) -> Quantized:
    """Which is larger than any matrix."""
    tensors, numbers, _ = _fp8_by_tensor(weight)
    stated = {"quant_method": "fp8", "weight_block_size": [LARGEST_GROUP, LARGEST_GROUP]}
    return {"weight": tensors["weight"], "weight_scale_inv": tensors["weight_scale"].view(1, 1)}, numbers, stated


def _nvfp4_of_modelopt(weight: torch.Tensor) -> Quantized:
    made = Compressed(_NVFP4, format="nvfp4-pack-quantized", weight=weight)
    tensors = {
        "weight": made.tensors["weight_packed"],
        "weight_scale": made.tensors["weight_scale"],
        "weight_scale_2": made.tensors["weight_global_scale"].reciprocal(),
    }
    stated = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
    return tensors, made.decompressed(), stated


_W4 = {"num_bits": 4, "group_size": 32}
_FP8_ROWS = {"num_bits": 8, "type": "float", "strategy": "channel"}
_MXFP4 = {"num_bits": 4, "type": "float", "group_size": 32, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
_NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
    "zp_dtype": torch.float8_e4m3fn,
}

METHODS: dict[str, Callable[[torch.Tensor], Quantized]] = {
    "W4A16": _compressed(weights=_W4),
    "W4A16 asymmetric": _compressed(weights={**_W4, "symmetric": False}),
    "W3A16": _compressed(weights={**_W4, "num_bits": 3}),
    "W8A8": _compressed(
        weights={"num_bits": 8, "strategy": "channel"},
        inputs={"num_bits": 8, "strategy": "token", "dynamic": True},
        format="int-quantized",
    ),
    "FP8 rows": _compressed(weights=_FP8_ROWS, format="float-quantized"),
    "MXFP4": _compressed(weights=_MXFP4, format="mxfp4-pack-quantized"),
    "NVFP4": _compressed(weights=_NVFP4, format="nvfp4-pack-quantized"),
    "NVFP4 of modelopt": _nvfp4_of_modelopt,
    "FP8 blocks": _fp8(32, 16),
    "FP8 large blocks": _fp8(64, 48),
    "FP8 tensors": _fp8_by_tensor,
    "FP8 in one block": _fp8_in_one_block,
    "W4A16 in order of groups": _in_order_of_groups,
    "embedding and head": _everything,
}

#: All of Llama; of other families what differs.
CASES = [
    *(("llama", method) for method in METHODS),
    *((family, method) for family in ("phi3", "mixtral") for method in ("W4A16 asymmetric", "FP8 tensors")),
    *(("deepseek_v3", method) for method in ("FP8 blocks", "FP8 large blocks", "W4A16")),
    *(("llama tied", "W4A16"), ("llama tied", "embedding and head"), ("qwen2", "W8A8")),
    *(("mixtral", "W4A16 in order of groups"), ("granitemoe", "FP8 blocks")),
]


@dataclass
class Pair:
    """A quantized checkpoint, and one of the numbers that it means.

    Attributes:
        codes, scales: bytes of what was quantized, as files hold it.
    """

    quantized: Path
    numbers: Path
    codes: int
    scales: int


def _save(folder: Path, tokenizer: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "generation_config.json"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Callable[[str, str], Pair]:
    sources = dict[str, Path]()

    def make(family: str, method: str) -> Pair:
        folder = tmp_path_factory.mktemp("pair")
        if family not in sources:
            torch.manual_seed(0)
            options = FAMILIES[family]
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family.split()[0]](**options)).float()
            sources[family] = tmp_path_factory.mktemp("source")
            model.save_pretrained(sources[family])
        config = json.loads((sources[family] / "config.json").read_text()) | {"dtype": "float32"}
        numbers, quantized, stated = dict[str, torch.Tensor](), dict[str, torch.Tensor](), {}
        codes, scales = 0, 0
        for name, tensor in load_file(sources[family] / "model.safetensors").items():
            if tensor.dim() == 1 or (_NUMBERS.search(name) and method != "embedding and head"):
                numbers[name] = quantized[name] = tensor
                continue
            parts, numbers[name], stated = _each(METHODS[method], tensor)
            module = name.removesuffix(".weight")
            quantized |= {f"{module}.{part}": found for part, found in parts.items()}
            codes += sum(part.nbytes for end, part in parts.items() if end in ("weight", "weight_packed"))
            scales += sum(part.nbytes for end, part in parts.items() if end in ("weight_scale", "weight_scale_inv"))
        return Pair(
            _save(folder / "quantized", tiny_llama, {**config, "quantization_config": stated}, quantized),
            _save(folder / "numbers", tiny_llama, config, numbers),
            codes,
            scales,
        )

    return make


_PROMPTS = [[5, 6, 7], [11, 200, 3, 17, 90, 41, 8, 150, 33], [2]]


Answers = list[tuple[list[int], list[float]]]


def _answers(folder: Path, **options: Any) -> Answers:
    llm = LLM(str(folder), max_model_len=128, num_gpu_blocks_override=64, dtype="float32", **options)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    outputs = [each.outputs[0] for each in llm.generate(_PROMPTS, params, use_tqdm=False)]
    return [
        (list(output.token_ids), [next(iter(each.values())).logprob for each in output.logprobs or []])
        for output in outputs
    ]


def _assert_close(answers: Answers, expected: Answers) -> None:
    for (tokens, logprobs), (their_tokens, theirs) in zip(answers, expected, strict=True):
        assert tokens == their_tokens
        assert logprobs == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize(("family", "method"), CASES)
def test_quantized_models_answer_as_their_numbers(
    family: str, method: str, pair_of: Callable[[str, str], Pair]
) -> None:
    pair = pair_of(family, method)
    answers, expected = _answers(pair.quantized), _answers(pair.numbers)
    # In another order sums are others; and the library divides scales where we multiply.
    if "order" in method or "NVFP4" in method:
        _assert_close(answers, expected)
    else:
        assert answers == expected


@pytest.mark.parametrize(
    "method", ["W4A16 asymmetric", "FP8 tensors", "W4A16 in order of groups", "embedding and head"]
)
def test_without_kernels_of_the_cpu(
    method: str, pair_of: Callable[[str, str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "cpu_library", lambda device, dtype: None)
    pair = pair_of("llama", method)
    _assert_close(_answers(pair.quantized), _answers(pair.numbers))


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("llama", method) for method in ("W4A16", "W3A16", "FP8 rows", "FP8 blocks")),
        *(("phi3", "W4A16"), ("mixtral", "FP8 blocks")),
    ],
)
def test_answers_are_those_of_transformers(
    family: str, method: str, pair_of: Callable[[str, str], Pair], assert_greedy: Callable[..., None]
) -> None:
    """Which loads the quantized checkpoint itself."""
    pair = pair_of(family, method)
    for prompt, (tokens, _) in zip(_PROMPTS, _answers(pair.quantized), strict=True):
        assert_greedy(pair.quantized, prompt, tokens)


@pytest.mark.parametrize(
    ("family", "method"),
    [("llama", "MXFP4"), ("llama", "FP8 tensors"), ("qwen2", "W8A8"), ("deepseek_v3", "FP8 blocks")],
)
def test_answers_are_those_of_transformers_with_the_numbers(
    family: str, method: str, pair_of: Callable[[str, str], Pair], assert_greedy: Callable[..., None]
) -> None:
    """Where it quantizes activations, computes in bfloat16, or does not know blocks that end within the matrix."""
    pair = pair_of(family, method)
    for prompt, (tokens, _) in zip(_PROMPTS, _answers(pair.quantized), strict=True):
        assert_greedy(pair.numbers, prompt, tokens)


def _decoder(folder: Path, ranks: Communicator | None = None) -> tuple[Decoder, int]:
    """The model, or one rank's part of it, and how many bytes the weights of the model were to take."""
    checkpoint, cpu, dtype = find_checkpoint(EngineArgs(str(folder))), torch.device("cpu"), torch.float32
    build = Build(
        dtype, attention_backend(cpu, served(dtype)), select.select_kernels(cpu, dtype), ranks or SingleRank()
    )
    model = checkpoint.load(build, cpu, 128)
    assert isinstance(model, Decoder)
    formats = checkpoint.weight_formats(dtype, cpu)
    return model, weight_bytes(checkpoint.config, dtype.itemsize, formats=formats)


@pytest.mark.parametrize(("family", "method"), CASES)
def test_weights_take_the_bytes_that_files_have(family: str, method: str, pair_of: Callable[[str, str], Pair]) -> None:
    pair = pair_of(family, method)
    model, planned = _decoder(pair.quantized)
    assert sum(target.tensor.nbytes for target in model.weight_targets().values()) == planned
    if family == "deepseek_v3":
        return  # whose kv_b_proj is computed with as numbers
    matrices = [
        (target.tensor, target.stored, target.inner)
        for target in model.weight_targets().values()
        if target.stored is not None
    ]
    held = sum(blocks.nbytes for blocks, _, _ in matrices)
    if "asymmetric" in method:
        # Zero points of 4 bits are bytes here: half of what a scale takes.
        assert held == pair.codes + pair.scales + pair.scales // 2
    elif method in ("FP8 blocks", "FP8 large blocks", "FP8 tensors", "FP8 in one block"):
        # Each row has the scales that it shares with others in the file.
        groups = sum(blocks.shape[0] * stored.groups(inner) for blocks, stored, inner in matrices)
        assert held == pair.codes + 4 * groups
    elif "NVFP4" in method:
        # Each row has its tensor's own scale.
        rows = sum(blocks.shape[0] for blocks, _, _ in matrices)
        assert held == pair.codes + pair.scales + 4 * rows
    else:
        assert held == pair.codes + pair.scales


def _stacks(tensors: dict[str, torch.Tensor], scale: str) -> dict[str, torch.Tensor]:
    """Mixtral's tensors with its experts in transformers' stacks, as far as they are in blocks of whole rows.

    Args:
        scale: what the names of scales end with.
    """
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in (0, 1):
        for part, joined in (("weight", ""), (scale, f"_{scale.removeprefix('weight_')}")):
            stem = f"model.layers.{layer}.block_sparse_moe.experts"
            one, two, three = (
                torch.stack([tensors[f"{stem}.{expert}.w{index}.{part}"].view(torch.uint8) for expert in range(4)])
                for index in (1, 2, 3)
            )
            dtype = tensors[f"{stem}.0.w1.{part}"].dtype
            found[f"model.layers.{layer}.mlp.experts.gate_up_proj{joined}"] = torch.cat([one, three], 1).view(dtype)
            found[f"model.layers.{layer}.mlp.experts.down_proj{joined}"] = two.view(dtype)
    return found


def test_stacks_of_experts(pair_of: Callable[[str, str], Pair]) -> None:
    pair = pair_of("mixtral", "FP8 blocks")
    weights = pair.quantized / "model.safetensors"
    stacked = _stacks(load_file(weights), "weight_scale_inv")
    assert stacked["model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 192, 64)
    assert stacked["model.layers.1.mlp.experts.gate_up_proj_scale_inv"].shape == (4, 6, 4)
    save_file(stacked, weights)
    assert _answers(pair.quantized) == _answers(pair.numbers)


def test_stacks_of_experts_in_mxfp4(pair_of: Callable[[str, str], Pair]) -> None:
    """gpt-oss' way to store them, in a family that is computed: its other matrices are numbers."""
    pair = pair_of("mixtral", "MXFP4")
    weights, config = pair.quantized / "model.safetensors", pair.quantized / "config.json"
    numbers, stacked = load_file(pair.numbers / "model.safetensors"), dict[str, torch.Tensor]()
    packed = {name.replace("weight_packed", "weight"): tensor for name, tensor in load_file(weights).items()}
    for name, tensor in _stacks(packed, "weight_scale").items():
        if name.endswith(("_proj", "_proj_scale")) and "experts" in name:
            blocks = name.removesuffix("_scale") + ("_scales" if name.endswith("_scale") else "_blocks")
            stacked[blocks] = tensor if name.endswith("_scale") else tensor.unflatten(-1, (-1, 16))
        elif name in numbers:
            stacked[name] = numbers[name]
    save_file({name: tensor.contiguous() for name, tensor in stacked.items()}, weights)
    stated = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": stated}))
    formats = find_checkpoint(EngineArgs(str(pair.quantized))).weight_formats(torch.float32, torch.device("cpu"))
    assert formats.stored("layers.0.experts.3.up.weight") == GroupFormat("fp4", 32, "e8m0")
    assert formats.stored("layers.0.q.weight") is None
    assert _answers(pair.quantized) == _answers(pair.numbers)


@dataclass
class _Rank(SingleRank):
    """One of several that never speak to each other."""

    rank: int = 0
    size: int = 2


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *((family, method) for family in ("llama wide", "phi3") for method in ("W4A16 asymmetric", "MXFP4")),
        *((family, method) for family in ("mixtral", "deepseek_v3") for method in ("FP8 rows", "FP8 blocks")),
    ],
)
def test_ranks_hold_their_shares(family: str, method: str, pair_of: Callable[[str, str], Pair]) -> None:
    pair = pair_of(family, method)
    whole = _decoder(pair.numbers)[0].weight_targets()
    for rank in (0, 1):
        shares = _decoder(pair.quantized, _Rank(rank))[0].weight_targets()
        matrices = {name: target for name, target in shares.items() if target.stored is not None}
        assert any(target.shard is not None for target in matrices.values())
        for name, target in matrices.items():
            assert target.stored is not None
            numbers = dequantize(target.tensor, target.stored, target.inner, torch.float32)
            assert torch.equal(numbers, target.part_of(whole[name].tensor)), name


@pytest.mark.parametrize(
    ("family", "method", "ranks", "message"),
    [
        ("llama", "FP8 large blocks", 2, "blocks of 48 columns"),
        ("llama wide", "W4A16 in order of groups", 2, "act order"),
        ("deepseek_v3", "FP8 blocks", 4, "multiples of 16"),
    ],
)
def test_what_ranks_cannot_share_is_refused(
    family: str, method: str, ranks: int, message: str, pair_of: Callable[[str, str], Pair]
) -> None:
    with pytest.raises(ModelError, match=message):
        _decoder(pair_of(family, method).quantized, _Rank(1, ranks))


@pytest.mark.parametrize(
    ("method", "damage", "message"),
    [
        ("FP8 tensors", {"weight_scale": torch.tensor(float("nan"))}, "nan or infinity"),
        ("FP8 tensors", {"weight": torch.full((64, 64), 0x7F, dtype=torch.uint8)}, "nan or infinity"),
        ("FP8 blocks", {"weight_scale_inv": torch.full((2, 4), float("inf"))}, "nan or infinity"),
        ("W4A16", {"weight_scale": torch.full((64, 2), float("inf"), dtype=torch.bfloat16)}, "nan or infinity"),
        ("W4A16", {"weight_scale": None}, "no weight_scale"),
        ("W4A16", {"weight_scale": torch.ones(64, 3)}, "has shape"),
        ("W4A16", {"weight_packed": torch.zeros(32, 8, dtype=torch.int32)}, "weight_shape"),
        ("W4A16", {"weight_packed": None}, "no weight"),
        ("MXFP4", {"weight_scale": torch.full((64, 2), 255, dtype=torch.uint8)}, "nan or infinity"),
    ],
)
def test_damaged_checkpoints_are_refused_in_a_sentence(
    method: str,
    damage: dict[str, torch.Tensor | None],
    message: str,
    pair_of: Callable[[str, str], Pair],
) -> None:
    folder = pair_of("llama", method).quantized
    tensors = load_file(folder / "model.safetensors")
    for part, tensor in damage.items():
        name = f"model.layers.1.self_attn.q_proj.{part}"
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor.view(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=message) as error:
        _decoder(folder)
    assert "q_proj" in str(error.value) and len(str(error.value)) < 400


def test_a_scheme_that_is_not_computed_is_refused(pair_of: Callable[[str, str], Pair]) -> None:
    folder = pair_of("llama", "W4A16").quantized
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["format"] = "marlin-24"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="marlin-24"):
        _decoder(folder)
