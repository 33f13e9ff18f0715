"""Every family compared with transformers: logits at every position and 64 greedy tokens, in fp32, batched, chunked,
cached.

Models are tiny, random and wide, with random norms and biases, since ones and zeros hide errors. Each is saved as a
real Hugging Face folder and read back, so that names and layouts of files are tested too.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker_common.errors import ModelError
from stoker_engine import LLM, SamplingParams
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.model_config import ModelConfig, read_config
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.kernels.cpu.library import library
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.layers.build import Build
from stoker_engine.models.decoder import Decoder
from stoker_engine.sizing.weight_sizes import weight_bytes

from ...support.engine import tiny_configs
from ...support.engine.tiny_models import prompts, reference_of, tiny_family


@pytest.mark.parametrize("name", tiny_configs.FAMILIES)
def test_family_equals_transformers(
    name: str, tmp_path: Path, decoder_of: Any, paged_run: Any, assert_run: Any
) -> None:
    theirs = tiny_family(name)
    theirs.save_pretrained(tmp_path)
    ours = decoder_of(tmp_path)
    assert weight_bytes(ours.config, 4) == sum(target.tensor.nbytes for target in ours.weight_targets().values())
    assert_run(paged_run(ours, prompts(), new_tokens=64), reference_of(theirs))


@pytest.mark.parametrize("name", ["gemma2", "cohere2", "mpt clip", "falcon 40b", "stablelm 12b"])
def test_families_equal_transformers_with_sdpa(
    name: str, tmp_path: Path, decoder_of: Any, paged_run: Any, assert_run: Any
) -> None:
    """SDPA is used on devices without CPU kernels."""
    theirs = tiny_family(name)
    theirs.save_pretrained(tmp_path)
    ours = decoder_of(tmp_path, backend=SdpaBackend())
    assert_run(paged_run(ours, prompts(), new_tokens=16), reference_of(theirs))


@pytest.mark.parametrize(
    "name", ["mistral", "gemma2", "gemma3", "cohere2", "falcon rw", "bloom", "mpt clip", "opt 350m", "gptj", "olmo2"]
)
def test_engine_output_equals_transformers(name: str, tmp_path: Path, tiny_llama: Path) -> None:
    """Prompts are chunked, batched, share a prefix, and are preempted: the cache is too small for all at once."""
    theirs = tiny_family(name)
    theirs.save_pretrained(tmp_path)
    for file in tiny_llama.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    blocks = {"gemma3": 500, "cohere2": 350}.get(name, 80)  # one of several layers has full attention
    llm = LLM(str(tmp_path), block_size=4, num_gpu_blocks_override=blocks, max_model_len=160, max_num_batched_tokens=24)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    prompt_list = [*prompts(), [*prompts()[0][:40], 7]]
    outputs = [output.outputs[0].token_ids for output in llm.generate(prompt_list, params, use_tqdm=False)]
    assert [len(output) for output in outputs] == [64] * len(prompt_list)
    if all(layer.sliding_window is None for layer in ModelConfig.from_dict(read_config(tmp_path)).layers):
        assert llm.engine.scheduler.num_preemptions > 0
    reference = reference_of(theirs)
    for prompt, output in zip(prompt_list, outputs, strict=True):
        logits = reference(prompt + output)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert (logits.max(-1).values - chosen).max() <= 1e-3


@pytest.mark.parametrize("architecture", FAMILIES)
def test_planner_counts_the_allocated_bytes(architecture: str) -> None:
    """With the family's default config in bfloat16, in which `wide` norms are float32."""
    config = ModelConfig.from_dict({"architectures": [architecture]})
    with torch.device("meta"):
        model = Decoder(config, Build(torch.bfloat16, SdpaBackend(), REFERENCE), config.default_model_len)
    assert weight_bytes(config, 2) == sum(target.tensor.nbytes for target in model.weight_targets().values())
    assert {target.tensor.device.type for target in model.weight_targets().values()} == {"meta"}
    assert weight_bytes(config, 2, tensor=1) <= 2 * weight_bytes(config, 2, tensor=2)


@pytest.mark.skipif(library() is None, reason="without the CPU's kernels a row's result depends on its batch")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", tiny_configs.FAMILIES)
def test_sequence_has_the_same_bits_alone_and_in_a_batch(
    name: str, dtype: torch.dtype, tmp_path: Path, decoder_of: Any, paged_run: Any
) -> None:
    """The two runs cut prompts into different chunks."""
    tiny_family(name).save_pretrained(tmp_path)
    ours = decoder_of(tmp_path, dtype=dtype)
    together = paged_run(ours, prompts(), new_tokens=8, dtype=dtype)
    alone = paged_run(ours, prompts()[:1], new_tokens=8, seed=1, dtype=dtype)
    assert torch.equal(torch.stack(alone.sequences[0].logits), torch.stack(together.sequences[0].logits))


def test_unsupported_activation_is_refused(tmp_path: Path, decoder_of: Any) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], **tiny_configs.FAMILIES["llama"][1], "hidden_act": "mish"})
    )
    with pytest.raises(ModelError, match="'mish' is not supported"):
        decoder_of(tmp_path)
