"""Prompts far beyond a real model's window: Gemma 3 270M (window 512) with up to 16k tokens, compared with
transformers.

All prompts are prefixes of one text, so transformers computes it once, and its cache is copied at each prompt's end;
from there it scores the engine's output. The engine's cache is guarded (`guarded_cache`).
"""

from __future__ import annotations

import copy
import itertools
import os
import pydoc_data.topics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from stoker_engine import LLM, SamplingParams
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.outputs import RequestOutput
from stoker_engine.kernels.cpu.library import library
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.sizing.cache_groups import blocks_per_sequence
from stoker_engine.sizing.kv_format import kv_format
from stoker_engine.sizing.memory import model_cache_groups
from stoker_engine.tokens.tokenizer import Tokenizer

LENGTHS = [600, 1_100, 2_300, 4_500, 16_000]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
FOUR = SamplingParams(n=4, seed=5, max_tokens=8, ignore_eos=True, logprobs=1)
TIE = 1e-3
#: Tolerance of log-probabilities of float32 logits that were summed in another order.
CLOSE = 5e-3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def all_threads() -> Iterator[None]:
    """Use all threads: these matrices are not tiny."""
    before = torch.get_num_threads()
    _use_threads(os.cpu_count() or 1)
    yield
    _use_threads(before)


def _use_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    kernels = library()
    if kernels is not None:
        kernels.stoker_use_threads(threads)


class Reference:
    """transformers' logits after each of `lengths` tokens of a text."""

    def __init__(self, folder: Path, gguf: Path, lengths: list[int]) -> None:
        self.lengths = lengths
        text = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
        self.text: list[int] = Tokenizer.load(gguf).encode(text[: 8 * lengths[-1]])[: lengths[-1]]
        assert len(self.text) == lengths[-1]
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._after: dict[int, tuple[torch.Tensor, DynamicCache]] = {}
        cache = DynamicCache(config=self._model.config)
        for start, end in itertools.pairwise(sorted({*range(0, lengths[-1], 1024), *lengths})):
            logits = self._forward(self.text[start:end], cache, keep=1)
            if end in lengths:
                self._after[end] = (logits, copy.deepcopy(cache))
        whole = self._forward(self.text[:1_100], None, keep=1)
        torch.testing.assert_close(self._after[1_100][0], whole, rtol=0, atol=2e-3)

    def logprobs(self, length: int, output: list[int]) -> torch.Tensor:
        """Return log-probabilities [len(output), vocabulary] of each token of `output` after `length` tokens."""
        first, cache = self._after[length]
        following = self._forward(output[:-1], copy.deepcopy(cache), keep=0)
        return torch.cat((first, following)).log_softmax(-1)

    def check(self, output: RequestOutput, greedy: bool) -> None:
        """Assert that log-probabilities equal the reference's, and greedy tokens are its likeliest."""
        length = len(output.prompt_token_ids)
        for one in output.outputs:
            assert one.logprobs is not None and len(one.logprobs) == len(one.token_ids)
            logprobs = self.logprobs(length, one.token_ids)
            for row, token, position in zip(logprobs, one.token_ids, one.logprobs, strict=True):
                for candidate, reported in position.items():
                    assert abs(reported.logprob - float(row[candidate])) <= CLOSE
                if greedy:
                    assert row.max() - row[token] <= TIE
                    if int(row.argmax()) != token:
                        break  # a tie: later tokens may differ

    def _forward(self, tokens: list[int], cache: DynamicCache | None, keep: int) -> torch.Tensor:
        with torch.inference_mode():
            ids = torch.tensor([tokens])
            found = self._model(ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=keep)
        logits: torch.Tensor = found.logits[0]
        return logits


@pytest.fixture(scope="module")
def reference(demo_gguf: Path, demo_reference: Path, part_of: Callable[[int], int]) -> Reference:
    return Reference(demo_reference, demo_gguf, LENGTHS if part_of(len(LENGTHS)) else LENGTHS[:2])


def engine(**options: Any) -> LLM:
    return LLM("demo://gemma-3-270m", **{"dtype": "float32", "max_model_len": 16_384, **options})


def test_whole_prompts_alone_equal_transformers(reference: Reference) -> None:
    llm = engine(max_num_batched_tokens=4_608, enable_prefix_caching=False, kv_cache_memory_bytes=1 << 30)
    for length in reference.lengths:
        if length > 4_608:
            continue  # more than one step; see the next test
        [output] = llm.generate(reference.text[:length], GREEDY, use_tqdm=False)
        reference.check(output, greedy=True)


def test_chunks_prefix_hits_and_forks_equal_transformers(reference: Reference) -> None:
    llm = engine(max_num_batched_tokens=700, kv_cache_memory_bytes=2 << 30)
    for before, length in itertools.pairwise([0, *reference.lengths]):
        [output] = llm.generate(reference.text[:length], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == (before - 1) // 16 * 16 if before else not output.num_cached_tokens
        reference.check(output, greedy=True)
        [output] = llm.generate(reference.text[:length], FOUR, use_tqdm=False)
        assert len(output.outputs) == 4 and output.num_cached_tokens == (length - 1) // 16 * 16
        reference.check(output, greedy=False)
    together = llm.generate([reference.text[:length] for length in reference.lengths], GREEDY, use_tqdm=False)
    for output in together:
        reference.check(output, greedy=True)


@pytest.mark.parametrize(("length", "prefix"), [(600, False), (1_100, True)])
def test_preempted_forks_equal_transformers(reference: Reference, length: int, prefix: bool) -> None:
    """There is little more room than for the prompt: four sequences are forked, and the last of them are preempted."""
    params = SamplingParams(n=4, seed=5, max_tokens=24, ignore_eos=True, logprobs=1)
    options: dict[str, Any] = {"max_model_len": length + 24, "max_num_batched_tokens": 128}
    groups = model_cache_groups(
        find_checkpoint(EngineArgs("demo://gemma-3-270m")).config, 16, kv_format("auto", "float32")
    )
    blocks = 1 + blocks_per_sequence(groups, length + 24, 128, 16)
    llm = engine(num_gpu_blocks_override=blocks, enable_prefix_caching=prefix, **options)
    [output] = llm.generate(reference.text[:length], params, use_tqdm=False)
    assert llm.engine.scheduler.num_preemptions > 0
    reference.check(output, greedy=False)
