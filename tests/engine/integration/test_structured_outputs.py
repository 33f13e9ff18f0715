"""Structured outputs of tiny random models, which would rather generate anything else.

Outputs are checked by independent references: `jsonschema`, `re`, and membership.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLParserLimits

from stoker_common.errors import RequestError
from stoker_engine import LLM, SamplingParams, StructuredOutputs, StructuredOutputsParams
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.grammar import Grammar
from stoker_engine.core.outputs import CompletionOutput
from stoker_engine.engine import Engine
from stoker_engine.grammar import grammars
from stoker_engine.grammar.compile import compile_grammar
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.tokens.tokenizer import Tokenizer

from ...support.engine.device_steps import engine_on_device
from ...support.engine.repeating_proposer import RepeatingProposer
from ...support.engine.tiny_models import save_model, tiny_llama_model

SMALL: dict[str, Any] = {"max_model_len": 320, "max_num_batched_tokens": 48, "max_num_seqs": 6, "dtype": "float32"}
SMALL |= {"long_prefill_token_threshold": 0}  # independent of measured times, for reproducible steps
ROOMY = 400  # blocks
EOS = 1


Constraint = tuple[StructuredOutputs, Callable[[str], bool]]


def constraints(rng: random.Random, count: int) -> list[Constraint]:
    """Return constraints with finitely many valid texts, each with an independent check of a text."""
    made: list[Constraint] = []
    for _ in range(count):
        kind = rng.choice(["regex", "choice", "json"])
        if kind == "regex":
            letters = "".join(rng.sample('abcdefgh 漢é"', 4))
            pattern = f"[{letters}]{{{rng.randrange(4)},{rng.randrange(4, 30)}}}(x|yé|z{{2}})"
            made.append((StructuredOutputs(regex=pattern), lambda text, p=pattern: bool(re.fullmatch(p, text))))
        elif kind == "choice":
            words = ["".join(rng.choices('abc "\\\n漢', k=rng.randrange(1, 12))) for _ in range(rng.randrange(1, 9))]
            made.append((StructuredOutputs(choice=words), lambda text, w=words: text in w))
        else:
            schema = _schema(rng, 2)
            made.append(
                (
                    StructuredOutputs(json=schema, disable_any_whitespace=True),
                    lambda text, s=schema: jsonschema.validate(json.loads(text), s) is None,
                )
            )
    return made


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["integer", "string", "enum", "boolean"] + ["object", "array"] * (2 if depth else 0)
    match rng.choice(kinds):
        case "integer":
            low = rng.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1000)}
        case "string":
            return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 12)}
        case "enum":
            return {"enum": rng.sample([1, "one", None, True, "Ünï", 2.5], 3)}
        case "boolean":
            return {"type": "boolean"}
        case "array":
            return {"type": "array", "items": _schema(rng, depth - 1), "maxItems": rng.randrange(4)}
    names = rng.sample(["a", "name", "größe", "x y"], rng.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth - 1) for name in names},
        "required": names[: rng.randrange(len(names) + 1)],
        "additionalProperties": False,
    }


def request(name: str, prompt: list[int], params: SamplingParams, outputs: StructuredOutputs | None) -> EngineRequest:
    grammar = None if outputs is None else Grammar(compile_grammar(outputs), outputs.begins_after)
    seed = params.seed or 0
    return EngineRequest(name, prompt, params, params.max_tokens or 16, seed, frozenset({EOS}), grammar=grammar)


def requests(rng: random.Random, made: Sequence[Constraint]) -> list[EngineRequest]:
    """Return requests of all kinds, some without a grammar; many share a prefix."""
    shared = [rng.randrange(5, 250) for _ in range(60)]
    drawn = []
    for index, (outputs, _) in enumerate(made):
        prompt = shared[: rng.randrange(60)] + [rng.randrange(5, 250) for _ in range(rng.randrange(1, 40))]
        common: dict[str, Any] = {"max_tokens": 200, "seed": index}
        params = rng.choice(
            [
                SamplingParams(temperature=0, **common),
                SamplingParams(temperature=1.5, n=rng.randrange(1, 5), logprobs=2, **common),
                SamplingParams(temperature=1.5, top_k=20, top_p=0.9, ignore_eos=True, **common),
                SamplingParams(temperature=1.5, min_tokens=7, frequency_penalty=1.5, repetition_penalty=1.3, **common),
                SamplingParams(temperature=1.5, logit_bias={EOS: 100, 70: -100}, min_p=0.01, **common),
            ]
        )
        drawn.append(request(str(index), prompt, params, outputs if index % 5 else None))
    return drawn


def run(engine: Engine, submitted: Sequence[EngineRequest], rng: random.Random) -> dict[tuple[str, int], list[object]]:
    """Run requests that arrive one after another; return tokens, log-probabilities and ends by request and sequence."""
    found: dict[tuple[str, int], list[object]] = {}
    waiting = list(submitted)
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.7:
            engine.add(waiting.pop(0))
        for delta in engine.step().deltas:
            logprobs = map(repr, delta.logprobs or [None] * len(delta.token_ids))
            end = [delta.finish_reason, delta.error] if delta.finish_reason else []
            of = found.setdefault((delta.request_id, delta.index), [])
            of += [*zip(delta.token_ids, logprobs, strict=True), *end]
    engine.scheduler.check()
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_usable
    return found


def engine_of(
    model: Path, blocks: int = ROOMY, proposer: Any = None, on_device: bool = False, **options: Any
) -> Engine:
    args = EngineArgs(str(model), num_gpu_blocks_override=blocks, **{**SMALL, **options})
    engine = engine_on_device(args, proposer) if on_device else Engine(args, find_checkpoint(args), proposer=proposer)
    engine.set_token_table(Tokenizer.load(model).token_table())
    return engine


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_gemma3"])
def test_outputs_satisfy_their_grammars_equally_in_every_schedule(model: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(model)
    made = constraints(random.Random(model), 20)
    submitted = requests(random.Random(model), made)
    expected = run(engine_of(folder), submitted, random.Random(0))
    tokenizer = Tokenizer.load(folder)
    for each, (_, is_right) in zip(submitted, made, strict=True):
        for index in range(each.num_sequences):
            *tokens, reason, error = expected[each.id, index]
            assert error is None
            if each.grammar is not None:
                assert reason is FinishReason.STOP, "a finite grammar ends"
                ids = [token for token, _ in tokens]
                assert ids[-1] == EOS and is_right(tokenizer.decode(ids[:-1]))
    num_blocks = 24 if model == "tiny_llama" else 70
    for blocks, proposer, options in (
        (num_blocks, None, {}),
        (ROOMY, None, {"async_scheduling": True}),
        (ROOMY, RepeatingProposer(), {}),
        (num_blocks, RepeatingProposer(), {"async_scheduling": True}),
        (ROOMY, None, {"on_device": True}),
        (num_blocks, RepeatingProposer(), {"on_device": True}),
    ):
        engine = engine_of(folder, blocks, proposer, **options)
        assert run(engine, submitted, random.Random(1)) == expected
        assert (engine.scheduler.num_preemptions > 0) == (blocks < ROOMY)
        engine.shutdown()
    single = submitted[6]
    alone = run(engine_of(folder), [single], random.Random(0))
    assert all(alone[key] == expected[key] for key in alone)


@pytest.mark.slow
def test_outputs_of_ranks_satisfy_their_grammars(tiny_llama: Path) -> None:
    made = constraints(random.Random(5), 8)
    submitted = requests(random.Random(5), made)
    args = EngineArgs(str(tiny_llama), num_gpu_blocks_override=ROOMY, device="cpu", tensor_parallel_size=2, **SMALL)
    engine = Engine.from_args(args)
    try:
        engine.set_token_table(Tokenizer.load(tiny_llama).token_table())
        found = run(engine, submitted, random.Random(0))
    finally:
        engine.shutdown()
    tokenizer = Tokenizer.load(tiny_llama)
    for each, (_, is_right) in zip(submitted, made, strict=True):
        if each.grammar is not None:
            for index in range(each.num_sequences):
                *tokens, reason, error = found[each.id, index]
                assert (reason, error) == (FinishReason.STOP, None)
                assert is_right(tokenizer.decode([token for token, _ in tokens][:-1]))


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def llm(tiny_llama: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """An engine in this process, or with two ranks."""
    llm = LLM(str(tiny_llama), num_gpu_blocks_override=ROOMY, device="cpu", tensor_parallel_size=request.param, **SMALL)
    yield llm
    llm.engine.shutdown()


def answers(llm: LLM, outputs: StructuredOutputs, **params: Any) -> list[CompletionOutput]:
    sampling = SamplingParams(
        **{"temperature": 1.5, "max_tokens": 200, "seed": 3, "structured_outputs": outputs, **params}
    )
    [answer] = llm.generate("the fox", sampling, use_tqdm=False)
    return answer.outputs


def test_vllms_class_name_works_offline(llm: LLM) -> None:
    assert StructuredOutputsParams is StructuredOutputs
    found = answers(llm, StructuredOutputsParams(choice=["Positive", "Negative"]), n=8)
    assert {each.text for each in found} == {"Positive", "Negative"}
    assert all(each.finish_reason == "stop" for each in found)
    with pytest.raises(RequestError) as refused:
        answers(llm, StructuredOutputs(grammar="start: nowhere"))
    assert refused.value.param == "structured_outputs.grammar"
    assert answers(llm, StructuredOutputs(regex="ab?"))[0].text in ("a", "ab")


def test_unsatisfiable_constraints_are_refused_offline(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no output satisfies this") as refused:
        answers(llm, StructuredOutputs(regex="[^\\s\\S]a"))
    assert refused.value.param == "structured_outputs.regex"
    with pytest.raises(RequestError, match="StructuredOutputs") as refused:
        SamplingParams(structured_outputs={"json": {"type": "object"}})  # type: ignore[arg-type]
    assert refused.value.param == "structured_outputs"


def test_output_ends_where_the_grammar_permits_nothing_else(llm: LLM) -> None:
    for params in ({"ignore_eos": True}, {"min_tokens": 150}, {"ignore_eos": True, "min_tokens": 150}):
        [found] = answers(llm, StructuredOutputs(regex="(lazy ){3}dog"), **params)
        assert (found.text, found.finish_reason) == ("lazy lazy lazy dog", "stop")


def test_output_continues_until_min_tokens_or_with_ignore_eos(llm: LLM) -> None:
    ends_early = {"logit_bias": {EOS: 100}, "temperature": 0}
    outputs = StructuredOutputs(regex="[ab]*")
    assert answers(llm, outputs, **ends_early)[0].text == ""
    [found] = answers(llm, outputs, min_tokens=20, **ends_early)
    assert len(found.token_ids) == 21 and re.fullmatch("[ab]+", found.text)  # then it ends immediately
    [found] = answers(llm, outputs, ignore_eos=True, max_tokens=30, **ends_early)
    assert found.finish_reason == "length" and len(found.token_ids) == 30 and re.fullmatch("[ab]+", found.text)


def test_stop_strings_and_bad_words_apply_within_a_grammar(llm: LLM) -> None:
    [found] = answers(llm, StructuredOutputs(regex="[abc]{60}"), stop=("b",), seed=1)
    assert found.finish_reason == "stop" and found.stop_reason == "b" and set(found.text) <= {"a", "c"}
    found = answers(llm, StructuredOutputs(choice=["a", "b"]), bad_words=("a",), n=10)[0]
    assert found.text == "b"
    assert answers(llm, StructuredOutputs(choice=["a"]), bad_words=("a",))[0].text == "a"  # the only choice left


def test_logprobs_are_those_of_the_unconstrained_model(llm: LLM) -> None:
    [found] = answers(llm, StructuredOutputs(choice=["zebra"]), logprobs=3)
    [free] = answers(llm, StructuredOutputs(regex="(.|\\n){0,50}"), logprobs=3, max_tokens=1)
    assert found.logprobs is not None and free.logprobs is not None
    best = [logprob for logprob in found.logprobs[0].values() if logprob.rank == 1]
    assert best == [logprob for logprob in free.logprobs[0].values() if logprob.rank == 1]
    assert all(position[token].rank for position, token in zip(found.logprobs, found.token_ids, strict=True))


def test_the_grammar_begins_after_the_free_text(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    [often] = tokenizer.encode("q")
    ends = r"(q|ox)\Z"  # at the end of a token
    for seed in range(6):
        outputs = StructuredOutputs(choice=["yes", "no"], begins_after=ends)
        bias = {often: 6, EOS: 4}
        [found] = answers(llm, outputs, seed=seed, max_tokens=280, ignore_eos=True, logit_bias=bias)
        ids = found.token_ids
        begins = next(i for i in range(len(ids)) if re.search(ends, tokenizer.decode(ids[: i + 1]))) + 1
        assert EOS not in ids[:begins]
        assert (
            tokenizer.decode(ids)[len(tokenizer.decode(ids[:begins])) :] in ("yes", "no")
            and found.finish_reason == "stop"
        )
    at_once = StructuredOutputs(choice=["yes", "no"], begins_after=None)
    assert answers(llm, at_once)[0].text in ("yes", "no")


def test_a_draft_may_end_the_free_text(tiny_llama: Path) -> None:
    class Oracle:
        """Proposes the end of unconstrained outputs and, after it, tokens that the grammar permits and forbids."""

        def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
            return [*end, *yes, *end][:max_tokens]

    tokenizer = Tokenizer.load(tiny_llama)
    end, yes = tokenizer.encode("q"), tokenizer.encode("yes")
    outputs = StructuredOutputs(choice=["yes", "yesterday"], begins_after=r"q\Z")
    params = SamplingParams(temperature=1.5, logit_bias={end[0]: 12}, max_tokens=200)
    submitted = [request(str(seed), [7, 8, 9], params, outputs) for seed in range(4)]
    expected = run(engine_of(tiny_llama), submitted, random.Random(0))
    assert run(engine_of(tiny_llama, proposer=Oracle()), submitted, random.Random(0)) == expected


def ending_by(folder: Path, eos_token_ids: list[int]) -> Path:
    """Return a model with these end-of-sequence tokens."""
    save_model(folder, tiny_llama_model())
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": eos_token_ids}))
    return folder


def test_unused_ids_and_special_tokens_are_never_generated_as_text(tmp_path: Path) -> None:
    llm = LLM(str(ending_by(tmp_path, [1, 2, 511])), num_gpu_blocks_override=ROOMY, **SMALL)
    num_tokens = len(llm.get_tokenizer().tokens)
    assert num_tokens < 511 and llm.engine.info.vocab_size == 512
    found = answers(llm, StructuredOutputs(regex="(.|\\n){0,120}"), n=6, temperature=4.0)
    ends = {each.token_ids[-1] for each in found}
    assert len(ends) > 1 and ends <= {1, 2, 511}
    for each in found:
        assert all(2 < token < num_tokens for token in each.token_ids[:-1])


def test_a_grammar_that_reaches_a_limit_ends_its_request_alone(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [
        request(f"free{i}", [5, 6, i], SamplingParams(seed=i, max_tokens=60, ignore_eos=True), None) for i in (7, 8)
    ]
    simple = request("simple", [5, 6], SamplingParams(seed=1, max_tokens=90), StructuredOutputs(regex="[ab]{9}"))
    expected = run(engine_of(tiny_llama), [*free, simple], random.Random(0))
    monkeypatch.setattr(grammars, "parser_limits", lambda: LLParserLimits(max_lexer_states=30, verbose_errors=False))
    pattern = "([ab]{3}|c)*" + "".join(f"(x{letter}[abx]{{9}})?" for letter in "abcdefgh") + "q"
    heavy = request(
        "heavy", [5], SamplingParams(n=3, temperature=1.5, max_tokens=200), StructuredOutputs(regex=pattern)
    )
    for options in ({}, {"async_scheduling": True}):
        found = run(engine_of(tiny_llama, **options), [*free[:1], heavy, simple, *free[1:]], random.Random(0))
        ends = [found.pop(("heavy", index)) for index in range(3)]
        assert found == expected
        for *_, reason, error in ends:
            assert reason is FinishReason.ERROR and "grammar cannot" in str(error) and "\n" not in str(error)


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(tiny_llama: Path) -> None:
    engine = engine_of(tiny_llama)
    bad = EngineRequest("bad", [5], SamplingParams(n=2), 16, grammar=Grammar("start: /[/"))
    good = request("good", [5], SamplingParams(), StructuredOutputs(choice=["a"]))
    aborted = request("gone", [5], SamplingParams(), StructuredOutputs(choice=["b"]))
    engine.add(aborted)
    engine.abort("gone")
    found = run(engine, [bad, good], random.Random(0))
    assert sorted(found) == [("bad", 0), ("bad", 1), ("good", 0)]
    for index in range(2):
        reason, error = found["bad", index]
        assert reason is FinishReason.ERROR and "cannot be compiled" in str(error)
    assert not engine.has_work


def test_grammars_are_refused_without_an_end_of_sequence_token(tmp_path: Path) -> None:
    llm = LLM(str(ending_by(tmp_path, [])), num_gpu_blocks_override=64, **SMALL)
    with pytest.raises(RequestError, match="end-of-sequence"):
        answers(llm, StructuredOutputs(choice=["a"]))
