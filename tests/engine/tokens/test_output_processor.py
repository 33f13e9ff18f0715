"""From the engine's tokens to a stream's text."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.logprobs import TokenLogprobs
from stoker_engine.core.outputs import OutputDelta, TokenDelta
from stoker_engine.core.sampling_params import BeamSearchParams, SamplingParams
from stoker_engine.tokens.output_processor import OutputProcessor
from stoker_engine.tokens.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(byte_level: Backend) -> Tokenizer:
    return Tokenizer(byte_level)


def request(params: SamplingParams | BeamSearchParams, prompt: list[int] | None = None) -> EngineRequest:
    return EngineRequest("r", prompt or [5], params, max_tokens=100)


def feed(
    tokenizer: Tokenizer,
    params: SamplingParams,
    steps: list[list[int]],
    last: FinishReason | None = FinishReason.LENGTH,
) -> tuple[list[OutputDelta], list[bool]]:
    """Return the output of one sequence, and the steps at which its stop is requested."""
    processor = OutputProcessor(tokenizer)
    processor.add(request(params))
    outputs, stops = [], []
    for number, tokens in enumerate(steps):
        reason = last if number == len(steps) - 1 else None
        output, stopped = processor.process(TokenDelta("r", 0, tokens, reason))
        stops.append(stopped)
        if output is not None:
            outputs.append(output)
    return outputs, stops


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    ids = [tokenizer.token_to_id(character.replace(" ", "Ġ")) for character in text]
    return [token for token in ids if token is not None]


def text_of(outputs: list[OutputDelta]) -> str:
    return "".join(output.text for output in outputs)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_output_does_not_depend_on_the_size_of_steps(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(3, 330), min_size=1, max_size=20))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids)), max_size=5)) | {len(ids)})
    steps = [ids[start:end] for start, end in zip([0, *cuts], cuts, strict=False)]
    outputs, _ = feed(tokenizer, SamplingParams(), steps)
    assert text_of(outputs) == tokenizer.decode(ids)
    assert [token for output in outputs for token in output.token_ids] == ids
    assert [output.finish_reason for output in outputs] == [None] * (len(steps) - 1) + [FinishReason.LENGTH]


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_over_several_tokens_ends_the_sequence(tokenizer: Tokenizer, include: bool) -> None:
    params = SamplingParams(stop=("lo w",), include_stop_str_in_output=include)
    steps = [[token] for token in letters(tokenizer, "hello world")]
    outputs, stops = feed(tokenizer, params, steps)
    assert text_of(outputs) == ("hello w" if include else "hel")
    assert stops == [False] * 6 + [True] + [False] * 4
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_reason == "lo w"
    assert len(outputs) == 7, "tokens after the stop string were reported"


def test_tokens_past_the_stop_string_of_one_step_are_dropped(tokenizer: Tokenizer) -> None:
    outputs, stops = feed(tokenizer, SamplingParams(stop=("lo",)), [letters(tokenizer, "hello world")], last=None)
    assert text_of(outputs) == "hel"
    assert outputs[0].token_ids == letters(tokenizer, "hello")
    assert stops == [True]


def test_stop_string_completed_by_the_last_token_is_found(tokenizer: Tokenizer) -> None:
    outputs, stops = feed(tokenizer, SamplingParams(stop=("lo",)), [[token] for token in letters(tokenizer, "hello")])
    assert text_of(outputs) == "hel"
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert stops[-1] is False, "the engine has ended the sequence already"


def test_stop_strings_are_ignored_before_min_tokens(tokenizer: Tokenizer) -> None:
    steps = [[token] for token in letters(tokenizer, "lo hello lo")]
    outputs, _ = feed(tokenizer, SamplingParams(stop=("lo",), min_tokens=4), steps)
    assert text_of(outputs) == "lo hel"


def test_stop_token_has_no_text_unless_included(tokenizer: Tokenizer) -> None:
    ids = letters(tokenizer, "abc")
    outputs, _ = feed(tokenizer, SamplingParams(stop_token_ids=(ids[2],)), [ids], FinishReason.STOP)
    assert (text_of(outputs), outputs[0].token_ids) == ("ab", ids)
    included = SamplingParams(stop_token_ids=(ids[2],), include_stop_str_in_output=True)
    assert text_of(feed(tokenizer, included, [ids], FinishReason.STOP)[0]) == "abc"


def test_special_tokens_are_skipped_unless_requested(tokenizer: Tokenizer) -> None:
    ids = [0, *letters(tokenizer, "a"), 1]
    assert text_of(feed(tokenizer, SamplingParams(), [ids])[0]) == "a"
    assert text_of(feed(tokenizer, SamplingParams(skip_special_tokens=False), [ids])[0]) == "<s>a</s>"


def test_sequences_of_a_request_are_separate_and_removed_together(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add(request(SamplingParams(n=2, stop=("b",))))
    first = letters(tokenizer, "ab")
    output, stopped = processor.process(TokenDelta("r", 0, first))
    assert output is not None
    assert (output.index, output.text, stopped) == (0, "a", True)
    output, stopped = processor.process(TokenDelta("r", 1, letters(tokenizer, "c"), FinishReason.LENGTH))
    assert output is not None
    assert (output.index, output.text, output.num_prompt_tokens) == (1, "c", 1)
    assert processor.process(TokenDelta("r", 0, first)) == (None, False)
    processor.add(request(SamplingParams()))
    processor.forget("r")
    processor.forget("r")
    assert processor.process(TokenDelta("r", 0, first)) == (None, False)


def test_beams_are_reported_whole(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add(request(BeamSearchParams(2)))
    delta = TokenDelta("r", 1, letters(tokenizer, "beam"), FinishReason.LENGTH, cumulative_logprob=-1.5)
    output, _ = processor.process(delta)
    assert output is not None
    assert (output.text, output.cumulative_logprob) == ("beam", -1.5)


def test_logprobs_carry_their_tokens_text(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add(request(SamplingParams(logprobs=2, prompt_logprobs=1), [5, 6]))
    a, b, c = letters(tokenizer, "ab ")
    output, _ = processor.process(
        TokenDelta(
            "r",
            0,
            [a],
            logprobs=[TokenLogprobs([a, b, c], [-3.0, -0.1, -0.2], 7)],
            prompt_logprobs=[TokenLogprobs([6, 6], [-0.5, -0.5], 1)],
        )
    )
    assert output is not None
    assert output.logprobs is not None
    entries = output.logprobs[0]
    assert [(token, entry.decoded_token, entry.rank) for token, entry in entries.items()] == [
        (a, "a", 7), (b, "b", 1), (c, " ", 2),
    ]  # fmt: skip
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert list(output.prompt_logprobs[1] or {}) == [6]


@pytest.mark.parametrize("again", [False, True])
def test_request_may_be_removed_while_its_text_is_computed(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """The event loop removes it without waiting; another request may get the same id."""
    processor = OutputProcessor(tokenizer)
    processor.add(request(SamplingParams()))
    token, interrupted = tokenizer.token, threading.Event()

    def remove() -> None:
        processor.forget("r")
        if again:
            processor.add(request(SamplingParams()))
        interrupted.set()

    def interrupting(token_id: int, skip_special_tokens: bool) -> str | None:
        if token_id == 42 and not interrupted.is_set():
            threading.Thread(target=remove).start()
            assert interrupted.wait(120), "the event loop waits for text"
        return token(token_id, skip_special_tokens)

    monkeypatch.setattr(tokenizer, "token", interrupting)
    output, _ = processor.process(TokenDelta("r", 0, [42], FinishReason.LENGTH))
    assert output is not None and output.finish_reason is FinishReason.LENGTH
    later, _ = processor.process(TokenDelta("r", 0, [43], FinishReason.LENGTH))
    assert (later is not None) == again
