"""Measure the perplexity of a model on a text, by Stoker's offline API: the quality cost of weight and KV formats.

    python benchmarks/perplexity.py demo://gemma-3-270m --run "--dtype float32" --run "--dtype bfloat16" --transformers

The method is that of llama.cpp's ``llama-perplexity``, so values are comparable: the tokens of the text are cut into
windows, the first token of each window is replaced with BOS, and the tokens of its second half are scored. Tokens after
the last whole window are not counted.

Each ``--run`` loads the model with these flags of ``stoker serve``. ``--transformers`` adds an independent reference:
transformers' model in float32, dequantized if necessary.
"""

from __future__ import annotations

import argparse
import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from stoker_engine import LLM, SamplingParams
from stoker_engine.contract import argv
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.models.hub.locate import locate_model
from stoker_engine.tokens.tokenizer import Tokenizer

TEXT = Path(__file__).parent / "data" / "persuasion.txt"

#: Maps the tokens of a window to the natural log-probabilities of all but the first.
Score = Callable[[list[int]], list[float]]


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of one run.

    Attributes:
        value: exponential of the mean negative log-probability of the scored tokens.
        error: standard error of `value`; the difference between two runs on the same text is far more precise.
        tokens: number of scored tokens.
        seconds: duration.
    """

    value: float
    error: float
    tokens: int
    seconds: float


def windows(tokenizer: Tokenizer, text: str, length: int) -> list[list[int]]:
    """Return the token ids of `text` in windows of `length`, each starting with BOS if the tokenizer adds one."""
    tokens = tokenizer.encode(text)
    begin = tokenizer.encode("")[:1]
    return [begin + tokens[start + len(begin) : start + length] for start in range(0, len(tokens) - length + 1, length)]


def perplexity(score: Score, each: Sequence[list[int]], name: str) -> Perplexity:
    """Compute the perplexity over the second halves of windows, as llama.cpp does: the last 255 of 512 tokens."""
    started = time.perf_counter()
    scored: list[float] = []
    with tqdm(each, desc=name, unit="window") as bar:
        for window in bar:
            scored += score(window)[len(window) // 2 :]
            bar.set_postfix_str(f"perplexity {math.exp(-sum(scored) / len(scored)):.3f}")
    mean = -sum(scored) / len(scored)
    variance = sum((logprob + mean) ** 2 for logprob in scored) / len(scored)
    error = math.exp(mean) * math.sqrt(variance / (len(scored) - 1))
    return Perplexity(math.exp(mean), error, len(scored), time.perf_counter() - started)


def stoker(model: str, flags: str) -> Score:
    """Score by the offline API's prompt log-probabilities; `flags` are those of ``stoker serve``."""
    parser = argv.Parser(prog="--run", allow_abbrev=False)
    argv.add_arguments(parser, EngineArgs, "engine")
    words = [model, "--kv-cache-memory-bytes=256m", *shlex.split(flags)]
    llm = LLM(**vars(argv.from_namespace(EngineArgs, parser.parse_args(words))))

    def score(window: list[int]) -> list[float]:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        [output] = llm.generate([window], params, use_tqdm=False)
        assert output.prompt_logprobs is not None, "logits are not finite; see the log"
        found = zip(output.prompt_logprobs[1:], window[1:], strict=True)
        return [position[token].logprob for position, token in found if position is not None]

    return score


def transformers(model: Path) -> Score:
    """Score by transformers' model in float32, from a folder or a GGUF file."""
    from transformers import AutoModelForCausalLM

    gguf: dict[str, Any] = {"gguf_file": model.name} if model.is_file() else {}
    folder = model.parent if model.is_file() else model
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **gguf).eval()

    def score(window: list[int]) -> list[float]:
        with torch.inference_mode():
            logits = loaded(torch.tensor([window])).logits[0, :-1].log_softmax(-1)
        return [float(row[token]) for row, token in zip(logits, window[1:], strict=True)]

    return score


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as for stoker serve")
    parser.add_argument("--run", action="append", metavar="FLAGS", help="flags of stoker serve; one run each")
    parser.add_argument("--transformers", action="store_true", help="transformers' float32 for comparison, first")
    parser.add_argument("--text", type=Path, default=TEXT, help="default: %(default)s")
    parser.add_argument("--window", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--windows", type=int, metavar="COUNT", help="the first so many only")
    options = parser.parse_args()

    model = locate_model(EngineArgs(options.model))
    text = options.text.read_text(encoding="utf-8")
    each = windows(Tokenizer.load(model), text, options.window)[: options.windows]
    if not each:
        parser.error(f"{options.text} has fewer than --window {options.window} tokens")
    runs: dict[str, Callable[[], Score]] = {}
    if options.transformers:
        runs["transformers, float32"] = partial(transformers, model)
    for flags in options.run or [""]:
        runs[flags or "no flags"] = partial(stoker, options.model, flags)
    found = {name: perplexity(load(), each, name) for name, load in runs.items()}
    first = next(iter(found.values())).value
    print(f"\n{options.model}, {len(each)} windows of {options.window} tokens of {options.text.name}:\n")
    print("| run | perplexity | of the first | seconds |", "|---|---|---|---|", sep="\n")
    for name, result in found.items():
        change = result.value / first - 1
        print(f"| {name} | {result.value:.4f} ± {result.error:.2f} | {change:+.3%} | {result.seconds:.0f} |")


if __name__ == "__main__":
    main()
