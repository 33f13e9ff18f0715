"""Real weights: what ways to store weights and keys cost, on two windows of the benchmark's text.

The reference is transformers' model of the same file in float32; its figure was computed by ``benchmarks/perplexity.py
demo://gemma-3-270m --windows 2 --transformers``. In which order numbers are summed, the processor decides.
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
def test_gemma(demo_gguf: Path, flags: str, limit: float) -> None:
    """The perplexity of the file as it is stored differs from the dequantized model's by no more than a share."""
    each = benchmark.windows(benchmark.Tokenizer.load(demo_gguf), benchmark.TEXT.read_text(), 512)[:2]
    found = benchmark.perplexity(benchmark.stoker(str(demo_gguf), flags), each, flags)
    assert found.tokens == 510
    assert found.value == pytest.approx(TRANSFORMERS, rel=limit)
