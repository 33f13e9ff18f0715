"""Files written by ``stoker quantize`` can be served, with the same model that transformers loads from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from stoker_common.errors import ArgumentError, ModelError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.export.compressed_tensors import export
from stoker_engine.export.schemes import SCHEMES, with_group_size
from stoker_engine.llm import LLM
from stoker_engine.models.checkpoint import find_checkpoint

from ...support.engine.tiny_configs import GGUF
from ...support.engine.tiny_models import random_model, save_model

_SIZES: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


#: Schemes whose experts transformers can merge.
_EXPERTS = ("W4A16", "W8A16", "FP8_DYNAMIC")


@pytest.mark.parametrize(
    "kind, scheme", [*(("llama", scheme) for scheme in SCHEMES), *(("qwen3_moe", scheme) for scheme in _EXPERTS)]
)
def test_engine_and_transformers_agree_on_exported_models(kind: str, scheme: str, tmp_path: Path) -> None:
    options = {**GGUF[kind][1], **_SIZES, "moe_intermediate_size": 32}
    save_model(tmp_path / "model", random_model(kind, options))
    used = SCHEMES[scheme] if not SCHEMES[scheme].group_size else with_group_size(SCHEMES[scheme], 32)
    export(tmp_path / "model", used, scheme, tmp_path / "new")
    prompt = [7, 8, 9] * 5
    llm = LLM(str(tmp_path / "new"), num_gpu_blocks_override=64)
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    tokens = output.outputs[0].token_ids
    assert len(tokens) == 24
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "new", quantization_config=CompressedTensorsConfig(dequantize=True), dtype=torch.float32
    )
    with torch.inference_mode():
        logits = theirs(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    for row, token in zip(logits, tokens, strict=True):
        assert row.max() - row[token] <= 1e-3
        if int(row.argmax()) != token:
            break  # a tie: later tokens may differ


def test_exported_model_is_not_quantized_again(tmp_path: Path) -> None:
    save_model(tmp_path / "model", random_model("llama", _SIZES))
    export(tmp_path / "model", SCHEMES["W8A8"], "W8A8", tmp_path / "new")
    with pytest.raises(
        ArgumentError, match="int4 is requested, but the checkpoint is already quantized by compressed-tensors"
    ):
        find_checkpoint(EngineArgs(model=str(tmp_path / "new"), quantization="int4"))
    find_checkpoint(EngineArgs(model=str(tmp_path / "new"), quantization="compressed-tensors"))
    with pytest.raises(ModelError, match="already quantized by compressed-tensors, but W8A8 is requested"):
        export(tmp_path / "new", SCHEMES["W8A8"], "W8A8", tmp_path / "newer")
