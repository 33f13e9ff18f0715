"""Real weights: the quality cost of weight and KV formats, on two windows of the benchmark's text.

The reference is transformers' model of the same file in float32; its value was computed by ``benchmarks/perplexity.py
demo://gemma-3-270m --windows 2 --transformers``. The order of sums depends on the processor.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

benchmark = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[3] / "benchmarks/perplexity.py")))
TRANSFORMERS = 40.1877


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "limit"), [("--dtype float32", 3e-5), ("--dtype bfloat16", 5e-3)])
def test_gemmas_perplexity_equals_transformers(demo_gguf: Path, flags: str, limit: float) -> None:
    """The perplexity of the stored file differs from the dequantized model's by at most this share."""
    each = benchmark.windows(benchmark.Tokenizer.load(demo_gguf), benchmark.TEXT.read_text(), 512)[:2]
    found = benchmark.perplexity(benchmark.stoker(str(demo_gguf), flags), each, flags)
    assert found.tokens == 510
    assert found.value == pytest.approx(TRANSFORMERS, rel=limit)
