"""Models that only transformers knows, with Stoker's paged attention, compared with transformers; refused models."""

from __future__ import annotations

import codecs
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from stoker_common.errors import ArgumentError, ModelError, WeightsError
from stoker_engine import LLM, SamplingParams
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.layers.build import Build
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.models.transformers_backend.model import TransformersModel
from stoker_engine.parallel.communicator import SingleRank
from stoker_engine.sizing.weight_sizes import weight_bytes

from ...support.engine.tiny_configs import SIZES
from ...support.engine.tiny_models import prompts, random_model, reference_of

_BUILD = Build(torch.float32, SdpaBackend(), REFERENCE)
_SIZES = {**SIZES, "num_hidden_layers": 3, "pad_token_id": 0}
_LOCAL = ["sliding_attention", "full_attention", "sliding_attention"]
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 6,
    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
    "short_mscale": 1.1,
    "long_mscale": 1.3,
    "original_max_position_embeddings": 64,
    "factor": 4.0,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "phimoe": ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "olmo3": ("olmo3", {"layer_types": _LOCAL, "sliding_window": 20}),
    "exaone4": ("exaone4", {"layer_types": _LOCAL, "sliding_window": 20, "tie_word_embeddings": True}),
    "vaultgemma": ("vaultgemma", {"layer_types": _LOCAL, "sliding_window": 20, "head_dim": 16}),
    "flex_olmo": ("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_bigcode": ("gpt_bigcode", {"n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 256, "n_inner": 80}),
    "minicpm3": (
        "minicpm3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
        },
    ),
}


def _tiny(model_type: str, options: dict[str, Any]) -> PreTrainedModel:
    return random_model(model_type, {**_SIZES, **options})


def _load(folder: Path, max_model_len: int = 256) -> TransformersModel:
    checkpoint = find_checkpoint(EngineArgs(model=str(folder)))
    model = checkpoint.load(_BUILD, torch.device("cpu"), max_model_len)
    assert isinstance(model, TransformersModel)
    return model


def _assert_equal(ours: TransformersModel, theirs: PreTrainedModel, paged_run: Any, assert_run: Any) -> None:
    assert_run(paged_run(ours, prompts(), new_tokens=64), reference_of(theirs))


@pytest.mark.parametrize("name", MODELS)
def test_models_equal_transformers(name: str, tmp_path: Path, paged_run: Any, assert_run: Any) -> None:
    theirs = _tiny(*MODELS[name])
    theirs.save_pretrained(tmp_path)
    ours = _load(tmp_path)
    assert weight_bytes(ours.config, 4) == 4 * sum(parameter.numel() for parameter in theirs.parameters())
    _assert_equal(ours, theirs, paged_run, assert_run)


def test_rope_factors_depend_on_max_model_len_alone(tmp_path: Path, paged_run: Any, assert_run: Any) -> None:
    options = {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _LONGROPE}
    theirs = _tiny("phimoe", options)
    theirs.save_pretrained(tmp_path)
    assert find_checkpoint(EngineArgs(model=str(tmp_path))).config.default_model_len == 64
    ours = _load(tmp_path, max_model_len=64)  # not beyond the original length: all sequences use the short factors
    short = [[5, 6, 7] * 12, [9] * 7]
    with torch.inference_mode():
        assert_run(paged_run(ours, short, new_tokens=20), reference_of(theirs))
        beyond = _load(tmp_path, max_model_len=256)  # beyond it: short sequences use the long factors, too
        run = paged_run(beyond, [[5, 6, 7] * 12], new_tokens=1).sequences[0]
        whole = theirs(torch.tensor([run.tokens[:-1] + [9] * 200])).logits[0, : len(run.logits)]
    assert (torch.stack(run.logits) - whole).abs().max() <= 1e-4 * whole.abs().max()


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("mamba", {}, "only full and sliding attention"),
        ("qwen3_next", {}, "linear_attention"),
        ("t5", {}, "encoder-decoder"),
        ("bert", {}, "not causal|not a causal|not an autoregressive"),
        ("doge", {}, "own attention mask"),
        ("xglm", {"d_model": 48, "attention_heads": 4, "num_layers": 2, "ffn_dim": 80}, "attention interface"),
        ("gemma3", {}, "vision|multimodal|supported"),
    ],
)
def test_unsupported_models_are_refused_with_the_reason(
    model_type: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = CONFIG_MAPPING[model_type](**({**_SIZES, **options} if model_type != "gemma3" else {}))
    if model_type == "doge":
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    else:
        config.architectures = config.architectures or [_architecture(model_type)]
        config.save_pretrained(tmp_path)
        save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=reason):
        _load(tmp_path)


def _architecture(model_type: str) -> str:
    names = {"mamba": "MambaForCausalLM", "qwen3_next": "Qwen3NextForCausalLM", "xglm": "XGLMForCausalLM"}
    others = {"t5": "T5ForConditionalGeneration", "bert": "BertForMaskedLM", "gemma3": "Gemma3ForSomethingElse"}
    return {**names, **others}[model_type]


def test_loading_reports_its_progress(tmp_path: Path) -> None:
    _tiny("smollm3", {}).save_pretrained(tmp_path)
    progress = list[None]()
    checkpoint = find_checkpoint(EngineArgs(model=str(tmp_path)))
    checkpoint.load(_BUILD, torch.device("cpu"), 256, lambda done, total: progress.append(None))
    assert len(progress) >= len(load_file(tmp_path / "model.safetensors"))


def test_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    class Two(SingleRank):
        size = 2

    _tiny("smollm3", {}).save_pretrained(tmp_path)
    checkpoint = find_checkpoint(EngineArgs(model=str(tmp_path)))
    with pytest.raises(ModelError, match=r"2 ranks.*--tensor-parallel-size"):
        checkpoint.load(replace(_BUILD, ranks=Two()), torch.device("cpu"), 256)


def test_missing_and_unused_tensors_are_errors(tmp_path: Path) -> None:
    _tiny("smollm3", {}).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    lost = "model.layers.1.mlp.up_proj.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"lack.*layers\.1\.mlp\.up_proj"):
        _load(tmp_path)
    save_file({**tensors, "model.layers.9.extra": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"does not use.*layers\.9\.extra"):
        _load(tmp_path)
    save_file({**tensors, lost: torch.zeros(3, 3)}, file, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"shape|mismatch|cannot read"):
        _load(tmp_path)


def test_nan_and_integer_weights_are_refused_by_name(tmp_path: Path) -> None:
    _tiny("smollm3", {}).save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name].log()}, file, {"format": "pt"})  # nan where it was below 0
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.up_proj\.weight holds nan or infinity"):
        _load(tmp_path)
    save_file({**tensors, name: tensors[name].to(torch.int8)}, file, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.up_proj\.weight holds .*not floating-point"):
        _load(tmp_path)


def test_remote_code_is_not_run_by_default(tmp_path: Path) -> None:
    config = {"architectures": ["OddForCausalLM"], "model_type": "odd_never_seen"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="newer version of transformers"):
        find_checkpoint(EngineArgs(model=str(tmp_path)))
    (tmp_path / "config.json").write_text(
        json.dumps(
            {**config, "auto_map": {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"}}
        )
    )
    (tmp_path / "odd.py").write_text("raise SystemExit('ran')\n")
    with pytest.raises(ModelError, match="--trust-remote-code"):
        find_checkpoint(EngineArgs(model=str(tmp_path)))


def test_remote_code_runs_with_trust_remote_code(tmp_path: Path, paged_run: Any, assert_run: Any) -> None:
    theirs = _tiny("smollm3", {})
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config |= {"model_type": "own_never_seen", "architectures": ["OwnForCausalLM"], "auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(
        "from transformers import SmolLM3Config, SmolLM3ForCausalLM\n"
        "class OwnConfig(SmolLM3Config):\n    model_type = 'own_never_seen'\n"
        "class OwnForCausalLM(SmolLM3ForCausalLM):\n    config_class = OwnConfig\n"
    )
    checkpoint = find_checkpoint(EngineArgs(model=str(tmp_path), trust_remote_code=True))
    ours = checkpoint.load(_BUILD, torch.device("cpu"), 256)
    assert isinstance(ours, TransformersModel)
    _assert_equal(ours, theirs, paged_run, assert_run)


def test_known_models_run_without_their_remote_code(tmp_path: Path) -> None:
    _tiny(*MODELS["phimoe"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    auto_map = {"AutoConfig": "own.PhiMoEConfig", "AutoModelForCausalLM": "own.PhiMoEForCausalLM"}
    config |= {"architectures": ["PhiMoEForCausalLM"], "auto_map": auto_map}  # as the hub has Phi-3.5-MoE
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert _load(tmp_path).config.architecture == "PhimoeForCausalLM"


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [(0, None, (0,)), (3, None, (3,)), (3, [3, 7], (3, 7)), (None, [0], (0,)), ([5, 10**6], None, (5,))],
)
def test_end_of_sequence_tokens_are_those_of_the_files(
    in_config: Any, in_generation_config: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    _tiny("smollm3", {}).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": in_config}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation_config}))
    assert find_checkpoint(EngineArgs(model=str(tmp_path))).config.eos_token_ids == expected


def test_byte_order_mark_of_the_config_is_ignored(tmp_path: Path) -> None:
    _tiny("smollm3", {}).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert _load(tmp_path).config.architecture == "SmolLM3ForCausalLM"
    config = json.loads(file.read_text(encoding="utf-8-sig"))
    config |= {"auto_map": {"AutoModelForCausalLM": "own.OwnForCausalLM"}}
    file.write_text(json.dumps(config), encoding="utf-8-sig")
    with pytest.raises(ModelError, match=r"transformers cannot read .*config\.json"):
        find_checkpoint(EngineArgs(model=str(tmp_path), trust_remote_code=True))


def test_batch_invariance_is_refused(tmp_path: Path) -> None:
    _tiny("smollm3", {}).save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match="--batch-invariant"):
        find_checkpoint(EngineArgs(model=str(tmp_path), batch_invariant=True))


@pytest.mark.parametrize("name", ["olmo3", "phimoe"])
def test_engine_output_equals_transformers(name: str, tiny_llama: Path, tmp_path: Path, assert_greedy: Any) -> None:
    _tiny(*MODELS[name]).save_pretrained(tmp_path)
    for file in tiny_llama.glob("*token*"):
        shutil.copy(file, tmp_path)
    # Few blocks and small steps: prompts are cut, prefixes are shared, windows are left, sequences are preempted.
    llm = LLM(str(tmp_path), num_gpu_blocks_override=40, max_model_len=128, max_num_batched_tokens=32, max_num_seqs=8)
    prompts = [[5, 6, 7] * 15 + [index] for index in range(2, 8)]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert_greedy(tmp_path, prompt, list(output.outputs[0].token_ids))
