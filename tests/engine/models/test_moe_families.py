"""Mixtures of experts and latent attention, compared with transformers: logits and 64 greedy tokens, batched, chunked,
cached.

Each checkpoint is read in both spellings: three matrices per expert, as on the hub, and transformers 5's stacks. Router
weights are wide, so that two experts' scores are rarely close.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stoker_common.errors import ModelError, WeightsError
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.kernels.cpu.library import library
from stoker_engine.sizing.weight_sizes import weight_bytes

from ...support.engine.tiny_configs import MIXTURES
from ...support.engine.tiny_models import prompts, reference_of, tiny_mixture


@pytest.mark.parametrize("name", MIXTURES)
def test_family_equals_transformers(
    name: str, tmp_path: Path, decoder_of: Any, paged_run: Any, assert_run: Any
) -> None:
    theirs = tiny_mixture(name)
    theirs.save_pretrained(tmp_path)
    ours = decoder_of(tmp_path)
    assert weight_bytes(ours.config, 4) == sum(target.tensor.nbytes for target in ours.weight_targets().values())

    # transformers saves the hub's spelling; its modules hold the other one.
    save_file({key: tensor.contiguous() for key, tensor in theirs.state_dict().items()}, tmp_path / "model.safetensors")
    stacked = decoder_of(tmp_path).weight_targets()
    assert all(torch.equal(target.tensor, stacked[name].tensor) for name, target in ours.weight_targets().items())

    assert_run(paged_run(ours, prompts(), new_tokens=64), reference_of(theirs))


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_a_missing_expert_is_an_error(name: str, tmp_path: Path, decoder_of: Any) -> None:
    tiny_mixture(name).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    lost = next(key for key in tensors if ".experts.1." in key)
    save_file({key: tensor for key, tensor in tensors.items() if key != lost}, file)
    with pytest.raises(WeightsError, match=r"lack 1 tensors.*experts\.1\."):
        decoder_of(tmp_path)


def test_draft_layers_are_ignored(tmp_path: Path, decoder_of: Any) -> None:
    tiny_mixture("deepseek_v3").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    draft = {"model.layers.3.eh_proj.weight": torch.zeros(2), "model.layers.3.mlp.gate.weight": torch.zeros(2)}
    save_file({**load_file(file), **draft}, file)
    decoder_of(tmp_path)


def test_dbrx_reads_the_rotary_base_of_attn_config() -> None:
    made_up = {"rope_theta": 10000.0, "rope_type": "default"}  # what transformers 5 adds when it saves the model
    stated = {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 8}, "rope_parameters": made_up}
    config = ModelConfig.from_dict({"architectures": ["DbrxForCausalLM"], **stated})
    assert config.layers[0].rope is not None and config.layers[0].rope.rope_theta == 500000.0


@pytest.mark.parametrize("option", [{"norm_topk_prob": True}, {"moe_layer_freq": 2}, {"topk_method": "noaux_tc"}])
def test_unsupported_deepseek_v2_options_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(option))):
        ModelConfig.from_dict({"architectures": ["DeepseekV2ForCausalLM"], **option})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_sequence_has_the_same_logits_in_every_batch(
    name: str, dtype: torch.dtype, tmp_path: Path, decoder_of: Any, paged_run: Any
) -> None:
    if library() is None:
        pytest.skip("needs the CPU's native kernels")
    tiny_mixture(name).save_pretrained(tmp_path)
    model = decoder_of(tmp_path, dtype=dtype)
    together = paged_run(model, prompts(), new_tokens=16, dtype=dtype).sequences
    for index, prompt in enumerate(prompts()):
        alone = paged_run(model, [prompt], new_tokens=16, seed=index + 1, dtype=dtype).sequences[0]
        assert alone.tokens == together[index].tokens
        assert torch.equal(torch.stack(alone.logits), torch.stack(together[index].logits))
