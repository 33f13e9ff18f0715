"""The real model: Gemma 3 270M from GGUF, compared with transformers on the same file in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker_engine import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "In 1969, the first human",
    "The three primary colours are",
    "Water boils at",
    "My favourite recipe for bread begins with",
    "The theory of relativity says that",
    "SELECT name FROM users WHERE",
    "Dear Sir or Madam,",
    "Le chat est",
    "日本の首都は",
    "Die Hauptstadt von Deutschland ist",
    "The largest planet in the solar system",
    "To install the package, run",
    "Q: What is 2 + 2?\nA:",
    "The sea was calm and the",
    "Kubernetes is an open-source",
    "🎉 Happy birthday",
    "Photosynthesis is the process by which",
]


@pytest.fixture(scope="module")
def llm(demo_gguf: Path) -> LLM:
    return LLM("demo://gemma-3-270m", dtype="float32", kv_cache_memory_bytes=256 << 20)


def test_greedy_equals_transformers(llm: LLM, demo_reference: Path, assert_greedy: Any) -> None:
    outputs = llm.generate(PROMPTS[:6], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    for output in outputs:
        assert_greedy(demo_reference, output.prompt_token_ids, output.outputs[0].token_ids)


def test_text_equals_the_tokenizers_decoding(llm: LLM) -> None:
    for output in llm.generate(PROMPTS[10:13], SamplingParams(temperature=0, max_tokens=24), use_tqdm=False):
        whole = llm.tokenizer.decode(output.prompt_token_ids + output.outputs[0].token_ids)
        assert output.prompt is not None
        assert whole == output.prompt + output.outputs[0].text


def test_a_base_model_cannot_chat_without_a_template(llm: LLM) -> None:
    with pytest.raises(Exception, match="--chat-template"):
        llm.chat([{"role": "user", "content": "Hello"}])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_prompts_equal_transformers_in_every_schedule(
    demo_reference: Path, assert_greedy: Any, part_of: Callable[[int], int]
) -> None:
    prompts = PROMPTS[-max(3, part_of(len(PROMPTS))) :]
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    options = {"dtype": "float32", "kv_cache_memory_bytes": 512 << 20}
    llm = LLM("demo://gemma-3-270m", **options)
    ways = {"alone": [llm.generate(prompt, greedy, use_tqdm=False)[0] for prompt in prompts]}
    fresh = LLM("demo://gemma-3-270m", **options)  # with an empty cache
    ways["together in one batch"] = fresh.generate(prompts, greedy, use_tqdm=False)
    del llm, fresh
    chunked = LLM("demo://gemma-3-270m", max_num_batched_tokens=16, **options)
    ways["together, in chunks of 16"] = chunked.generate(prompts, greedy, use_tqdm=False)
    shared = "This text is shared by all the prompts, and long enough to fill several blocks of the cache. "
    prefixed = [shared + prompt for prompt in prompts]
    chunked.generate(prefixed[0], greedy, use_tqdm=False)
    ways["with prefix hits"] = chunked.generate(prefixed, greedy, use_tqdm=False)
    assert all(output.num_cached_tokens >= 16 for output in ways["with prefix hits"])
    for outputs in ways.values():
        for output in outputs:
            assert len(output.outputs[0].token_ids) == 64
            assert_greedy(demo_reference, output.prompt_token_ids, output.outputs[0].token_ids)
    chunked.engine.scheduler.check()
    assert chunked.engine.scheduler.kv.usage == 0
