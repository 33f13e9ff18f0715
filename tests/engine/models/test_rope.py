"""Rotary embeddings that depend on the longest sequence: fixed once, and equal to transformers' on both sides of the
original length.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel

from ...support.engine.tiny_configs import LONGROPE_FACTORS, SIZES, VOCABULARY

_ORIGINAL = 48
_SIZES: dict[str, Any] = {
    **{name: size for name, size in SIZES.items() if name != "max_position_embeddings"},
    "vocab_size": VOCABULARY,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def _dynamic() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    return LlamaForCausalLM(LlamaConfig(**_SIZES, max_position_embeddings=_ORIGINAL, rope_parameters=rope))


def _longrope() -> PreTrainedModel:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, **LONGROPE_FACTORS}
    return Phi3ForCausalLM(
        Phi3Config(
            **_SIZES,
            max_position_embeddings=4 * _ORIGINAL,
            original_max_position_embeddings=_ORIGINAL,
            rope_parameters=rope,
        )
    )


@pytest.mark.parametrize("make", [_dynamic, _longrope])
@pytest.mark.parametrize("length", [_ORIGINAL, 3 * _ORIGINAL])
def test_logits_equal_transformers_on_both_sides_of_the_original_length(
    make: Any, length: int, tmp_path: Path, decoder_of: Any, paged_run: Any
) -> None:
    torch.manual_seed(0)
    theirs = make().float().eval()
    theirs.save_pretrained(tmp_path)
    ours = decoder_of(tmp_path, max_model_len=length)
    assert ours.config.default_model_len == _ORIGINAL
    assert ours.config.longest_model_len == 4 * _ORIGINAL
    tokens = torch.randint(2, 128, (length,)).tolist()
    # transformers chooses its frequencies by the length of its input: the whole sequence at once.
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    [sequence] = paged_run(ours, [tokens], new_tokens=1).sequences
    torch.testing.assert_close(torch.stack(sequence.logits), expected, atol=1e-4, rtol=1e-4)


def test_logits_depend_on_max_model_len(tmp_path: Path, decoder_of: Any, paged_run: Any) -> None:
    """Verifies that the tests above are meaningful."""
    torch.manual_seed(0)
    _longrope().float().save_pretrained(tmp_path)
    runs = [paged_run(decoder_of(tmp_path, max_model_len=n), [[5, 6, 7, 8]], new_tokens=1) for n in (_ORIGINAL, 99)]
    short, long = (run.sequences[0].logits[-1] for run in runs)
    assert (short - long).abs().max() > 1e-2
