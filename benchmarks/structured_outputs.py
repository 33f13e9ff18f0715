"""Measure the cost of grammars per step: streams with a JSON Schema or a regular expression against free streams.

All streams run on one engine and the kinds alternate, so that other load on the machine affects them equally. The ratio
is the median over rounds of constrained / free step time.

    python benchmarks/structured_outputs.py [MODEL] [--streams 32] [--rounds 5] [--temperature 0]

Before that, the time of the first grammar is measured: it includes indexing the vocabulary, during which no step runs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Final

from rich.console import Console
from rich.table import Table

from stoker_engine import LLM, SamplingParams, StructuredOutputs
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.grammar import Grammar
from stoker_engine.grammar.compile import compile_grammar

SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 20},
        "story": {"type": "string", "minLength": 600},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 4},
        "age": {"type": "integer"},
    },
    "required": ["name", "story", "tags", "age"],
    "additionalProperties": False,
}

KINDS: Final[dict[str, StructuredOutputs | None]] = {
    "free": None,
    "JSON Schema": StructuredOutputs(json=SCHEMA),
    "regular expression": StructuredOutputs(regex=r"((red|green|blue) [0-9]{1,3}\n){300,400}"),
}

#: Source of request ids.
_numbers = itertools.count()


def steps(llm: LLM, outputs: StructuredOutputs | None, streams: int, tokens: int, temperature: float) -> list[float]:
    """Return the times of steps in which all streams decode, in seconds."""
    params = SamplingParams(temperature=temperature, ignore_eos=True)
    grammar = None if outputs is None else Grammar(compile_grammar(outputs))
    ends = frozenset(llm.engine.info.eos_token_ids)
    for seed in range(streams):
        prompt = llm.tokenizer.encode(f"Write JSON, number {seed}:")
        name = str(next(_numbers))
        llm.engine.add(EngineRequest(name, prompt, params, tokens, seed, ends, grammar=grammar))
    times = []
    while llm.engine.has_work:
        began = time.perf_counter()
        done = llm.engine.step()
        if len(done.deltas) == streams and done.report is not None and not done.report.num_prompt_tokens:
            times.append(time.perf_counter() - began)
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="The cost of grammars, per step.")
    parser.add_argument("model", nargs="?", default="demo://gemma-3-270m")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24, help="output tokens of each stream in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    llm = LLM(options.model, max_model_len=1024, max_num_seqs=options.streams)
    began = time.perf_counter()
    llm.engine.set_token_table(llm.tokenizer.token_table())
    steps(llm, StructuredOutputs(choice=["yes"]), 1, 8, 0)
    first = time.perf_counter() - began
    times: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for _ in range(options.rounds):
        for kind, outputs in KINDS.items():
            times[kind].append(steps(llm, outputs, options.streams, options.tokens, options.temperature))
    table = Table("outputs", "ms per step (median)", "÷ free", "ms per step (minimum)", "÷ free")
    medians = {kind: [statistics.median(each) for each in rounds] for kind, rounds in times.items()}
    least = {kind: min(min(each) for each in rounds) for kind, rounds in times.items()}
    for kind, of_kind in medians.items():
        ratio = statistics.median(mine / free for mine, free in zip(of_kind, medians["free"], strict=True))
        table.add_row(
            kind,
            f"{statistics.median(of_kind) * 1e3:.1f}",
            f"{ratio:.3f}",
            f"{least[kind] * 1e3:.1f}",
            f"{least[kind] / least['free']:.3f}",
        )
    Console().print(f"{options.streams} streams; first grammar, including indexing the vocabulary: {first:.2f} s")
    Console().print(table)


if __name__ == "__main__":
    main()
