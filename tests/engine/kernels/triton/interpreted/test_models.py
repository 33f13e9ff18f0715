"""Models with Triton's kernels, compared with transformers: families with different kinds of attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stoker_engine import LLM, SamplingParams
from stoker_engine.attention.triton import TritonBackend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.kernels.triton.bundle import TRITON
from stoker_engine.layers.build import Build
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.models.decoder import Decoder

from .....support.engine.tiny_models import prompts, reference_of, tiny_family, tiny_mixture
from ....models.conftest import PagedRun, assert_run_is, load_decoder
from ....models.test_gpt_oss import _save as save_gpt_oss
from ....models.test_gpt_oss import unquantized

#: A window, a soft cap, ALiBi, shared and separate KV heads, odd head sizes.
FAMILIES = ["gemma2", "falcon rw", "llama", "mistral", "gemma3", "cohere2", "bloom", "mpt clip", "opt 350m", "gptj"]
#: Families that take minutes; gemma2 also has a window.
LONG = ("gemma3", "cohere2")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow(drawn=name not in LONG)] * (number > 0))
        for number, name in enumerate(FAMILIES)
    ],
)
def test_family_equals_transformers(name: str, tmp_path: Path) -> None:
    theirs = tiny_family(name)
    theirs.save_pretrained(tmp_path)
    ours = load_decoder(tmp_path, backend=TritonBackend(), kernels=TRITON)
    assert_run_is(PagedRun(ours, prompts(2), new_tokens=6), reference_of(theirs))


@pytest.mark.parametrize(
    "name", ["deepseek_v3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "dbrx", "qwen2_moe"))]
)
def test_mixture_equals_transformers(name: str, tmp_path: Path) -> None:
    theirs = tiny_mixture(name)
    theirs.save_pretrained(tmp_path)
    ours = load_decoder(tmp_path, backend=TritonBackend(), kernels=TRITON)
    assert_run_is(PagedRun(ours, [[5, 17, 99, 3, 64, 2, 31], [8]], new_tokens=3), reference_of(theirs))


@pytest.mark.slow
@pytest.mark.parametrize("in_blocks", [False, True])
def test_gpt_oss_equals_transformers(in_blocks: bool, tmp_path: Path) -> None:
    """Biases of experts, and clamped gates; unquantized and in MXFP4."""
    theirs = save_gpt_oss(tmp_path) if in_blocks else unquantized(tmp_path)
    if not in_blocks:
        for parameter in theirs.parameters():
            parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.data if parameter.dim() == 1 else 0)
        theirs.save_pretrained(tmp_path)
    build = Build(torch.float32, TritonBackend(), TRITON)
    ours = find_checkpoint(EngineArgs(str(tmp_path))).load(build, torch.device("cpu"), max_model_len=256)
    assert isinstance(ours, Decoder)
    assert_run_is(PagedRun(ours, [[5, 17, 99, 3, 64, 2, 31], [8]], new_tokens=3), reference_of(theirs))


@pytest.mark.parametrize(
    "kv_cache_dtype", ["auto", pytest.param("fp8_per_token_head", marks=pytest.mark.slow(drawn=False))]
)
def test_engine_output_equals_that_with_sdpa(kv_cache_dtype: str, tiny_llama: Path) -> None:
    """The flag selects the backend; prompts are chunked and share a prefix."""
    texts = []
    for backend in ("triton", "sdpa"):
        llm = LLM(
            str(tiny_llama), device="cpu", attention_backend=backend, kv_cache_dtype=kv_cache_dtype,
            num_gpu_blocks_override=80, max_model_len=160, max_num_batched_tokens=24,
        )  # fmt: skip
        prompt_list = [*prompts(2), [*prompts(2)[0][:20], 7]]
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        texts.append([output.outputs[0].token_ids for output in llm.generate(prompt_list, params, use_tqdm=False)])
    assert texts[0] == texts[1]
