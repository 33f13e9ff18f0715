"""GGUF of every family: a tiny transformers model is written by llama.cpp's rules, read back, and compared in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from stoker_common.errors import ModelError
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.layers.build import Build
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.gguf.gguf_file import GGUFFile
from stoker_engine.models.loading.weights import load_weights

from ...support.engine.tiny_configs import GGUF, SIZES, VOCABULARY
from ...support.engine.tiny_models import random_model, reference_of, tiny_gguf
from . import llama_cpp

#: Families whose GGUF transformers reads itself, which tests the writer too.
READ_BY_TRANSFORMERS = ("bloom", "falcon 7b", "gemma2", "llama", "qwen2", "starcoder2")


def _ours(file: GGUFFile) -> Decoder:
    with torch.inference_mode():
        model = Decoder(file.config(), Build(torch.float32, SdpaBackend(), REFERENCE), max_model_len=128)
        load_weights(model, file, file.weight_names())
    return model


def _assert_equal(ours: Decoder, theirs: PreTrainedModel, paged_run: Any, assert_run: Any) -> None:
    prompt = torch.randint(2, VOCABULARY, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    assert_run(paged_run(ours, [prompt], new_tokens=2), reference_of(theirs))


@pytest.mark.parametrize("name", GGUF)
def test_families_read_from_gguf_equal_transformers(name: str, tmp_path: Path, paged_run: Any, assert_run: Any) -> None:
    theirs = tiny_gguf(name)
    path = llama_cpp.write(theirs, tmp_path / "model.gguf")
    _assert_equal(_ours(GGUFFile(path)), theirs, paged_run, assert_run)


@pytest.mark.parametrize("bias", [False, True])
def test_internlm_2_files_are_read_as_llama(bias: bool, tmp_path: Path, paged_run: Any, assert_run: Any) -> None:
    theirs = random_model("llama", {**SIZES, "attention_bias": bias})  # InternLM 2's code is remote only
    path = llama_cpp.write(theirs, tmp_path / "model.gguf", architecture="internlm2")
    assert GGUFFile(path).config().architecture == "InternLM2ForCausalLM"
    _assert_equal(_ours(GGUFFile(path)), theirs, paged_run, assert_run)


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_written_files(name: str, tmp_path: Path) -> None:
    theirs = tiny_gguf(name)
    llama_cpp.write(theirs, tmp_path / "model.gguf")
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).state_dict()
    for key, tensor in theirs.state_dict().items():
        assert torch.allclose(read[key], tensor, atol=1e-6), key


_THETA = {"rope_theta": 10000.0}
_LONG = {"short_factor": [1.0, 1.1, 1.3, 1.5, 1.9, 2.5], "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0]}


def _frequencies(model: PreTrainedModel) -> torch.Tensor:
    plain = 1.0 / 10000.0 ** (torch.arange(0, 12, 2) / 12)
    return plain / model.get_decoder().rotary_emb.inv_freq


def test_linear_and_yarn_rope_scaling_are_read(tmp_path: Path, paged_run: Any, assert_run: Any) -> None:
    for rope, metadata in (
        ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            {"type": "yarn", "factor": 4.0, "original_context_length": 64},
        ),
    ):
        theirs = random_model("qwen2", {**SIZES, "rope_parameters": {**rope, **_THETA}})
        extra = {f"rope.scaling.{key}": value for key, value in metadata.items()}
        path = llama_cpp.write(theirs, tmp_path / f"{rope['rope_type']}.gguf", extra)
        _assert_equal(_ours(GGUFFile(path)), theirs, paged_run, assert_run)


def test_llama_3_rope_factors_are_read_from_a_tensor(tmp_path: Path, paged_run: Any, assert_run: Any) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_THETA}
    theirs = random_model("llama", {**SIZES, "rope_parameters": {**rope, "original_max_position_embeddings": 64}})
    path = llama_cpp.write(theirs, tmp_path / "model.gguf", tensors={"rope_freqs.weight": _frequencies(theirs)})
    config = GGUFFile(path).config()
    assert config.default_model_len == 256  # stretched already: nothing changes at the original length
    _assert_equal(_ours(GGUFFile(path)), theirs, paged_run, assert_run)


def test_phi_3_rope_factors_are_read_from_tensors(tmp_path: Path, paged_run: Any, assert_run: Any) -> None:
    rope = {"rope_type": "longrope", "partial_rotary_factor": 1.0, **_THETA, **_LONG}
    options = {**SIZES, "pad_token_id": 0, "original_max_position_embeddings": 128, "rope_parameters": rope}
    theirs = random_model("phi3", options)
    factor = theirs.get_decoder().rotary_emb.attention_scaling
    extra = {"rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": float(factor)}
    factors = {f"rope_factors_{kind}.weight": torch.tensor(_LONG[f"{kind}_factor"]) for kind in ("short", "long")}
    path = llama_cpp.write(theirs, tmp_path / "model.gguf", extra, factors)
    _assert_equal(_ours(GGUFFile(path)), theirs, paged_run, assert_run)


def test_unknown_rope_scaling_is_refused(tmp_path: Path) -> None:
    theirs = random_model("llama", SIZES)
    path = llama_cpp.write(theirs, tmp_path / "model.gguf", {"rope.scaling.type": "odd", "rope.scaling.factor": 2.0})
    with pytest.raises(ModelError, match="odd"):
        GGUFFile(path).config()
