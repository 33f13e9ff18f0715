"""Models with Triton's kernels, against transformers: families that differ in what attention has to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker_engine import LLM, SamplingParams
from stoker_engine.attention.triton import TritonBackend
from stoker_engine.kernels.triton.bundle import TRITON

from ....models.conftest import PagedRun, assert_run_is, load_decoder
from ....models.test_families import prompts, reference_of, tiny

#: A window, a soft cap, ALiBi, heads that share keys or do not, odd sizes of heads.
FAMILIES = ["gemma2", "falcon rw", "llama", "mistral", "gemma3", "cohere2", "bloom", "mpt clip", "opt 350m", "gptj"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (number > 1)) for number, name in enumerate(FAMILIES)]
)
def test_family_equals_transformers(name: str, tmp_path: Path) -> None:
    theirs = tiny(name)
    theirs.save_pretrained(tmp_path)
    ours = load_decoder(tmp_path, backend=TritonBackend(), kernels=TRITON)
    assert_run_is(PagedRun(ours, prompts(2), new_tokens=6), reference_of(theirs))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_per_token_head"])
def test_through_the_engine(kv_cache_dtype: str, tiny_llama: Path) -> None:
    """By the flag: in chunks, with prefix hits."""
    texts = []
    for backend in ("triton", "sdpa"):
        llm = LLM(
            str(tiny_llama), attention_backend=backend, kv_cache_dtype=kv_cache_dtype, num_gpu_blocks_override=80,
            max_model_len=160, max_num_batched_tokens=24,
        )  # fmt: skip
        todo = [*prompts(2), [*prompts(2)[0][:20], 7]]
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        texts.append([output.outputs[0].token_ids for output in llm.generate(todo, params, use_tqdm=False)])
    assert texts[0] == texts[1]
