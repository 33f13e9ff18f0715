"""Plans compared with known facts about models and accelerators: published sizes, arithmetic, and their authors'
recipes.

Each row states its source. Values that depend on vLLM's own use of memory are only checked by bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pytest

from stoker_common.model_source import ModelSource
from stoker_engine.sizing.kv_format import kv_format
from stoker_engine.sizing.memory import model_cache_groups
from stoker_operator.plan.model_shapes import Shape, shape_of
from stoker_operator.plan.planner import Study

H100, H200, A100, L4, MI300X = "nvidia-h100-80gb", "nvidia-h200", "nvidia-a100-80gb", "nvidia-l4", "amd-mi300x"
LLAMA_8B, LLAMA_70B, LLAMA_405B = (f"meta-llama/Llama-3.1-{size}-Instruct" for size in ("8B", "70B", "405B"))
DEEPSEEK, KIMI = "deepseek-ai/DeepSeek-V3", "moonshotai/Kimi-K2-Instruct"
OSS_20B, OSS_120B = "openai/gpt-oss-20b", "openai/gpt-oss-120b"
MIXTRAL, MIXTRAL_22B = "mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x22B-Instruct-v0.1"
MINIMAX, SCOUT = "MiniMaxAI/MiniMax-M2", "meta-llama/Llama-4-Scout-17B-16E-Instruct"
QWEN_235B, QWEN_480B = "Qwen/Qwen3-235B-A22B-FP8", "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8"
GEMMA_27B, QWEN_7B = "google/gemma-3-27b-it", "Qwen/Qwen2.5-7B-Instruct"
EIGHT_DEALT: Final = {"tensor": 8, "expert": 8}


class Fact(NamedTuple):
    """A known fact about a model on accelerators.

    Attributes:
        model, accelerator, count: the pod's model, and the kind and number of its accelerators.
        why: source of the fact.
        refused: reason of the refusal; empty if it runs.
        gigabytes: weights on each accelerator.
        length, max_length: bounds of the estimated max_model_len.
        parallelism, engine: further parts of the spec.
    """

    model: str
    accelerator: str
    count: int
    why: str
    refused: str = ""
    gigabytes: float | None = None
    length: int = 1
    max_length: int = 1 << 40
    parallelism: dict[str, Any] | None = None
    engine: dict[str, Any] = {}  # noqa: RUF012 - read only


FACTS = (
    Fact(LLAMA_8B, L4, 1, "8.03 billion × 2 bytes; 24 GB leave some 5 GB, 128 KiB a token", "", 16.1, 16384, 40000),
    Fact(LLAMA_8B, "nvidia-a10g", 1, "as an L4: the same memory", "", 16.1, 16384, 40000),
    Fact(LLAMA_8B, "nvidia-t4", 1, "16.1 GB of weights in 16.1 GB", "DoesNotFit", engine={"dtype": "float16"}),
    Fact(LLAMA_8B, "nvidia-t4", 2, "half of it on each", "", 8.0, 16384, engine={"dtype": "float16"}),
    Fact(LLAMA_8B, H100, 1, "some 55 GB of cache are over 400,000 tokens, as vLLM's logs show", "", 16.1, 131072),
    Fact(LLAMA_8B, "nvidia-l40s", 1, "some 25 GB of cache are its whole length once", "", 16.1, 131072),
    Fact(LLAMA_8B, L4, 4, "a quarter of it on each", "", 4.0, 131072),
    Fact(LLAMA_70B, H100, 1, "141 GB in 80", "DoesNotFit"),
    Fact(LLAMA_70B, H100, 1, "70.6 billion bytes and embeddings in 78.7 GB leave nothing", "DoesNotFit",
         engine={"quantization": "fp8"}),
    Fact(LLAMA_70B, H100, 2, "141 GB in 160 leave a few thousand tokens at 320 KiB", "", 70.6, 2048, 30000),
    Fact(LLAMA_70B, H100, 4, "Meta's own advice is four or more; its whole length fits", "", 35.3, 131072),
    Fact(LLAMA_70B, H100, 8, "the usual node", "", 17.6, 131072),
    Fact(LLAMA_70B, H200, 1, "141.1 GB in 150.8 of which 92% are used", "DoesNotFit"),
    Fact(LLAMA_70B, H200, 2, "two H200 hold its whole length", "", 70.6, 131072),
    Fact(LLAMA_70B, MI300X, 1, "AMD runs it on one: 141 GB in 192", "", 141.1, 32768, 131072),
    Fact(LLAMA_70B, "nvidia-a100-40gb", 4, "141 GB in 160, as two of 80 GB", "", 35.3, 2048, 40000),
    Fact(LLAMA_70B, L4, 8, "141 GB in 193 leave room, and the heads divide", "", 17.6, 16384),
    Fact("Qwen/Qwen2.5-72B-Instruct", H100, 4, "72.7 billion × 2 bytes by four", "", 36.4, 32768),
    Fact("Qwen/Qwen2.5-72B-Instruct-AWQ", H100, 1, "4 bits a number: Qwen says 41 GB", "", 41.6, 32768),
    Fact("Qwen/Qwen2.5-72B-Instruct-AWQ", "nvidia-l40s", 1, "41.6 GB in 48.3 of which 44.4 are used", "DoesNotFit"),
    Fact(LLAMA_405B, H100, 8, "811 GB in 640", "DoesNotFit"),
    Fact(LLAMA_405B + "-FP8", H100, 8, "Meta made the FP8 checkpoint to fit one node of eight", "", 51.3, 131072),
    Fact(LLAMA_405B, H200, 8, "811 GB in 1,128: NVIDIA shows it on one HGX H200", "", 101.5, 131072),
    Fact(LLAMA_405B, MI300X, 8, "AMD's and Meta's own example: one node of MI300X", "", 101.5, 131072),
    Fact("mistralai/Mistral-Large-Instruct-2407", H100, 4, "123 billion: Mistral says a single node", "", 61.3, 32768),
    Fact(MIXTRAL, A100, 1, "46.7 billion × 2 bytes in 80", "DoesNotFit"),
    Fact(MIXTRAL, A100, 2, "vLLM's documentation has it on two", "", 46.7, 32768),
    Fact(MIXTRAL_22B, A100, 4, "281 GB in 320", "", 70.3, 2048),
    Fact(MIXTRAL_22B, A100, 2, "281 GB in 160", "DoesNotFit"),
    Fact(GEMMA_27B, A100, 1, "27.4 billion × 2 bytes: Google says 54 GB, one H100 or A100", "", 54.8, 65536),
    Fact(GEMMA_27B, "nvidia-l40s", 1, "54.8 GB in 48", "DoesNotFit"),
    Fact(GEMMA_27B, "nvidia-l40s", 2, "half of it on each, and the eyes on both", "", 27.8, 65536),
    Fact("Qwen/Qwen3-30B-A3B", A100, 1, "30.5 billion × 2 bytes", "", 61.1, 40960),
    Fact("Qwen/Qwen3-30B-A3B-FP8", H100, 4, "768 ÷ 4 by blocks of 128: vLLM issue 25292", "ExpertsNotDivisible"),
    Fact(OSS_20B, L4, 1, "OpenAI: within 16 GB of memory; the file has 13.8 GB", "", 13.75, 16384),
    Fact(OSS_120B, H100, 1, "OpenAI: on a single 80 GB GPU; the file has 65 GB", "", 65.2, 32768),
    Fact(OSS_120B, "nvidia-l40s", 1, "65 GB in 48", "DoesNotFit"),
    Fact(OSS_120B, H100, 8, "2,880 ÷ 8 by blocks of 32: vLLM pads what does not divide", "", 8.2, 131072),
    Fact(DEEPSEEK, H100, 8, "671 billion bytes in 640 GB", "DoesNotFit"),
    Fact(DEEPSEEK, H200, 8, "DeepSeek's and vLLM's own recipe", "", 85.1, 163840),
    Fact(DEEPSEEK, "nvidia-h20", 8, "runs on eight H20 of 96 GB, with a short context", "", 85.1, 16384, 100000),
    Fact(DEEPSEEK, MI300X, 8, "AMD's recipe for one node", "", 85.1, 163840),
    Fact(DEEPSEEK, "nvidia-b200", 8, "one node of B200", "", 85.1, 163840),
    Fact(KIMI, H200, 8, "1,026 GB in 1,128: Moonshot names 16 H200 for the whole context", "", 129.7, 2048, 100000),
    Fact(KIMI, H100, 8, "1,026 GB in 640", "DoesNotFit"),
    Fact(KIMI, "nvidia-b300", 8, "1,026 GB in 2,300", "", 129.7, 131072),
    Fact(MINIMAX, H100, 4, "vLLM's recipe: four of 80 GB", "", 57.6, 131072),
    Fact(MINIMAX, H100, 8, "vLLM's recipe: pure TP 8 is not supported (1,536 ÷ 8 by blocks of 128)",
         "ExpertsNotDivisible"),
    Fact(MINIMAX, H100, 8, "vLLM's recipe: TP 8 with expert parallelism", "", 28.8, 196608, parallelism=EIGHT_DEALT),
    Fact(QWEN_235B, H100, 4, "Qwen: TP 4 for the FP8 checkpoint", "", 59.2, 40960),
    Fact(QWEN_235B, H100, 8, "1,536 ÷ 8 by blocks of 128", "ExpertsNotDivisible"),
    Fact(QWEN_480B, H200, 8, "2,560 ÷ 8 by blocks of 128", "ExpertsNotDivisible"),
    Fact(QWEN_480B, H200, 8, "vLLM's recipe: with expert parallelism", "", 60.4, 262144, parallelism=EIGHT_DEALT),
    Fact(SCOUT, H100, 8, "Meta and vLLM: a million tokens on eight H100", "", 28.6, 1_000_000, 10_485_760),
    Fact(SCOUT, H100, 2, "217 GB in 160", "DoesNotFit"),
    Fact(QWEN_7B, L4, 8, "28 heads do not divide by 8", "HeadsNotDivisible"),
    Fact(QWEN_7B, L4, 4, "28 heads by 4, and 4 of keys and values", "", 3.8, 32768),
)  # fmt: skip


@pytest.mark.parametrize("fact", FACTS, ids=lambda it: f"{it.model.partition('/')[2]}-{it.count}x{it.accelerator}")
def test_plans_match_known_facts(studied: Callable[..., Study], fact: Fact) -> None:
    found = studied(f"hf://{fact.model}", fact.accelerator, fact.count, parallelism=fact.parallelism, **fact.engine)
    assert {violation.reason for violation in found.unplannable} == ({fact.refused} if fact.refused else set())
    if fact.refused:
        return
    estimate = found.chosen.estimate
    assert estimate is not None and estimate.max_model_len is not None
    assert fact.gigabytes is not None
    assert estimate.weight_bytes_per_gpu / 1e9 == pytest.approx(fact.gigabytes, rel=0.01, abs=0.06)
    assert fact.length <= estimate.max_model_len <= fact.max_length
    model_len = found.wanted_len
    assert (estimate.max_model_len < model_len) == any("sequences are limited" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("model", "bytes_per_token", "why"),
    [
        (LLAMA_8B, 131_072, "32 layers × 2 × 8 heads × 128 × 2 bytes"),
        (LLAMA_70B, 327_680, "80 layers × 2 × 8 heads × 128 × 2 bytes"),
        (LLAMA_405B, 516_096, "126 layers × 2 × 8 heads × 128 × 2 bytes"),
        (MIXTRAL, 131_072, "32 layers × 2 × 8 heads × 128 × 2 bytes: experts keep nothing"),
        (QWEN_7B, 57_344, "28 layers × 2 × 4 heads × 128 × 2 bytes"),
        ("Qwen/Qwen3-30B-A3B", 98_304, "48 layers × 2 × 4 heads × 128 × 2 bytes"),
        (DEEPSEEK, 70_272, "61 layers × (512 + 64) × 2 bytes: latent attention, as its paper has it"),
        (MINIMAX, 253_952, "62 layers × 2 × 8 heads × 128 × 2 bytes"),
    ],
)
def test_kv_bytes_per_token_match_known_values(model: str, bytes_per_token: int, why: str) -> None:
    shape = shape_of(ModelSource.parse(f"hf://{model}"), None, "vllm")
    assert isinstance(shape, Shape), why
    groups = model_cache_groups(shape.config, 16, kv_format("auto", "bfloat16"))
    assert sum(group.bytes_per_token for group in groups) == bytes_per_token, why


@pytest.mark.parametrize(
    ("model", "full", "windows"),
    [(OSS_120B, 18, {128: 18}), (GEMMA_27B, 10, {1024: 52}), (SCOUT, 12, {8192: 36})],
)
def test_numbers_of_sliding_window_layers_match_model_cards(model: str, full: int, windows: dict[int, int]) -> None:
    """By their model cards, every second, sixth and fourth layer has full attention."""
    shape = shape_of(ModelSource.parse(f"hf://{model}"), None, "vllm")
    assert isinstance(shape, Shape)
    seen = [layer.sliding_window for layer in shape.config.layers]
    assert seen.count(None) == full
    assert {window: seen.count(window) for window in seen if window} == windows


@pytest.mark.parametrize(
    ("model", "accelerator", "count", "pods", "why"),
    [
        (LLAMA_8B, H100, 8, (2, 4), "one holds three sequences of 131,072 tokens, two hold seven"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", H100, 8, (1, 8), "one holds 53 of 8,192"),
        (LLAMA_70B, H100, 8, (8, 1), "four hold three of 131,072"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", H100, 8, (4, 2), "two hold one of 8,192"),
        ("Qwen/Qwen2.5-72B-Instruct", H100, 8, (4, 2), "as 70B with 32,768"),
        (QWEN_7B, L4, 8, (2, 4), "one holds a cut sequence"),
        (DEEPSEEK, H200, 8, (8, 1), "one engine is the node"),
    ],
)
def test_recommendations_match_known_recipes(
    studied: Callable[..., Study], model: str, accelerator: str, count: int, pods: tuple[int, int], why: str
) -> None:
    advice = studied(f"hf://{model}", accelerator, count).advice
    assert advice is not None, why
    assert (advice.count, advice.replicas) == pods, why
