"""Effects of grammars on other requests: those that share one, later ones, and those that wait for one."""

from __future__ import annotations

import random
import re
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLParserLimits

from stoker_engine import SamplingParams, StructuredOutputs
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.grammar import Grammar
from stoker_engine.grammar import grammars
from stoker_engine.grammar.compile import compile_grammar
from stoker_engine.grammar.token_table import TokenTable

from ...support.engine.repeating_proposer import RepeatingProposer
from .test_structured_outputs import engine_of, request, run

#: A grammar whose lexer keeps adding states.
MANY_STATES = StructuredOutputs(regex="(a|b)*a(a|b){8}")


def limit_states(monkeypatch: pytest.MonkeyPatch, max_states: int) -> None:
    monkeypatch.setattr(
        grammars, "parser_limits", lambda: LLParserLimits(max_lexer_states=max_states, verbose_errors=False)
    )


def watch_compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the threads in which grammars are compiled, one entry per compilation."""
    threads: list[str] = []
    compile_one = grammars.Grammars._compile

    def compile_grammar(self: grammars.Grammars, source: str) -> grammars.Compiled:
        threads.append(threading.current_thread().name)
        return compile_one(self, source)

    monkeypatch.setattr(grammars.Grammars, "_compile", compile_grammar)
    return threads


@pytest.mark.parametrize("drafts", [False, True])
def test_a_cached_grammar_is_compiled_again_before_it_reaches_its_limit(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, *, drafts: bool
) -> None:
    params = [SamplingParams(n=3, temperature=1.5, seed=seed, max_tokens=30, ignore_eos=True) for seed in range(8)]
    requests = [request(str(seed), [5, 6, seed + 7], each, MANY_STATES) for seed, each in enumerate(params)]
    proposer = RepeatingProposer() if drafts else None
    expected = run(engine_of(tiny_llama, proposer=proposer), requests, random.Random(0))
    compiled = watch_compiler(monkeypatch)
    limit_states(monkeypatch, 150)
    engine = engine_of(tiny_llama, proposer=proposer)
    for each in requests:  # one after another, then together
        alone = run(engine, [each], random.Random(0))
        assert alone == {key: expected[key] for key in alone}
    assert run(engine, requests, random.Random(0)) == expected
    assert 2 < len(compiled) < 30, "the grammar is shared until it nears its limit"


def test_a_grammar_with_too_many_states_ends_its_request(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_states(monkeypatch, 20)
    params = SamplingParams(n=2, temperature=1.5, max_tokens=60, ignore_eos=True)
    found = run(engine_of(tiny_llama), [request("large", [5], params, MANY_STATES)], random.Random(0))
    for *_, reason, error in found.values():
        assert reason is FinishReason.ERROR and "too many states" in str(error)


def test_grammars_are_compiled_once_and_never_in_a_step(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_KEPT", 1)
    threads = watch_compiler(monkeypatch)
    requests = [
        request(str(seed), [5], SamplingParams(n=2, seed=seed), StructuredOutputs(regex=f"[ab]{{{seed + 3}}}"))
        for seed in range(9)
    ]
    for blocks in (400, 24):
        threads.clear()
        found = run(engine_of(tiny_llama, blocks), requests, random.Random(0))
        assert len(found) == 18 and len(threads) == 9
        assert all(name.startswith("grammars") for name in threads)


def test_a_prepared_request_that_cannot_be_added_ends_alone(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tiny_llama)
    good = [request(str(seed), [5], SamplingParams(), StructuredOutputs(regex="a{4}")) for seed in range(2)]
    bad = request("bad", [5], SamplingParams(n=2), StructuredOutputs(regex="b{4}"))
    add = engine.scheduler.add

    def fail_at_bad(requests: EngineRequest) -> Any:
        if requests.id == "bad":
            raise ValueError("no")
        return add(requests)

    monkeypatch.setattr(engine.scheduler, "add", fail_at_bad)
    found = run(engine, [good[0], bad, good[1]], random.Random(0))
    assert {key: value[-2] for key, value in found.items()} == {
        ("0", 0): FinishReason.STOP,
        ("1", 0): FinishReason.STOP,
        ("bad", 0): FinishReason.ERROR,
        ("bad", 1): FinishReason.ERROR,
    }


def table_of(*more: bytes) -> TokenTable:
    """Return a table of all bytes, other tokens, and the end token last."""
    words = [*(bytes([byte]) for byte in range(256)), *more, b"</s>"]
    return TokenTable.of(words, [len(words) - 1])


@pytest.mark.parametrize("marker", ["</think>", "Here is my response:"])
def test_a_grammar_begins_after_its_marker_in_any_tokens(marker: str) -> None:
    text = marker.encode()
    odd = [text[-1:] + b"\n\n", b"x" + text[:2], text[3:], text, text[-1:] + b'{"', text[-1:] + b"no"]
    end = 256 + len(odd)
    made = grammars.Grammars(end + 1, [end])
    made.set_token_table(table_of(*odd))
    source = compile_grammar(StructuredOutputs(json={"type": "object"}))
    grammar = Grammar(source, re.escape(marker))
    spellings = {
        "letters": [*text],
        "whole": [5, 256 + 3],
        "a token over its end": [*text[:-1], 256],
        "two over its beginning and its middle": [256 + 1, text[2], 256 + 2],
        "the grammar's first letters in its last token": [*text[:-1], 256 + 4],
    }
    for how, tokens in spellings.items():
        for cut in range(len(tokens) + 1):
            matcher = made.begin(grammar)
            matcher.consume(tokens[:cut])
            assert matcher.has_started == (cut == len(tokens)), how
            matcher = matcher.copy()
            matcher.consume(tokens[cut:])
            assert matcher.has_started and matcher.error is None, how
        matcher.consume(list(b'a": 1}') if "first letters" in how else list(b'{"a": 1}'))
        assert matcher.error is None and matcher.matcher.is_accepting(), how
    matcher = made.begin(grammar)
    matcher.consume([*text[:-1], 256 + 5])
    assert matcher.error is not None, "a token that the grammar does not permit"


def test_requests_waiting_for_a_grammar_are_counted(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tiny_llama)
    never: Future[object] = Future()
    monkeypatch.setattr(engine.executor, "prepare", lambda grammar: never)
    engine.add(request("waits", [5], SamplingParams(), MANY_STATES))
    report = engine.step().report
    assert report is not None and report.stats.num_waiting == 1
    assert engine.has_work and engine.step().report is None, "nothing has changed"
    engine.abort("waits")
    assert never.cancelled() and engine.has_work
    report = engine.step().report
    assert report is not None and report.stats.num_waiting == 0 and not engine.has_work
