"""From the thread that reads the engine to a response's coroutine: nothing is lost, duplicated or reordered."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_common.errors import RequestFailedError
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.logprobs import Logprob
from stoker_engine.core.outputs import OutputDelta
from stoker_engine.tokens.output_stream import OutputStream


def generated(request: str, index: int, length: int, logprobs: bool) -> list[OutputDelta]:
    """Return a sequence's deltas by step: up to three tokens, whose text may come later."""
    chance = random.Random(f"{request}/{index}/{length}")
    deltas, token = list[OutputDelta](), 0
    for step in range(length):
        tokens = [token + i for i in range(chance.randint(0, 3))]
        token += len(tokens)
        deltas.append(
            OutputDelta(
                request,
                text="".join(f"<{request}.{index}.{t}>" for t in tokens) if chance.random() < 0.8 else "",
                token_ids=tokens,
                index=index,
                num_prompt_tokens=7,
                num_cached_tokens=3,
                logprobs=[{t: Logprob(-t / 8, 1, str(t))} for t in tokens] if logprobs else None,
                prompt_logprobs=[None, {5: Logprob(-1.0)}] if logprobs and step == 0 else None,
            )
        )
    last = replace(deltas[-1], finish_reason=FinishReason.STOP, stop_reason="end", cumulative_logprob=-2.5)
    return [*deltas[:-1], last]


def joined(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Merge by the definition: concatenated text, tokens and log-probabilities, the rest from the last delta."""
    text, tokens, logprobs = "", list[int](), list[dict[int, Logprob]]()
    for delta in deltas:
        text += delta.text
        tokens += delta.token_ids
        logprobs += delta.logprobs or []
    return replace(
        deltas[-1],
        text=text,
        token_ids=tokens,
        logprobs=None if deltas[0].logprobs is None else logprobs,
        prompt_logprobs=deltas[0].prompt_logprobs,
    )


Keys = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2)), min_size=1, max_size=6, unique=True)


@given(
    keys=Keys,
    length=st.integers(1, 20),
    logprobs=st.booleans(),
    takes=st.sets(st.integers(0, 120)),
    interval=st.sampled_from([1, 2, 5, None]),
)
def test_output_does_not_depend_on_when_it_is_read(
    keys: list[tuple[str, int]], length: int, logprobs: bool, takes: set[int], interval: int | None
) -> None:
    async def run() -> None:
        stream = OutputStream(interval)
        came: dict[tuple[str, int], list[OutputDelta]] = {key: [] for key in keys}
        sequences = [generated(*key, length, logprobs) for key in keys]
        put = [delta for step in zip(*sequences, strict=True) for delta in step]
        for number, delta in enumerate(put):
            stream.put(delta)
            if (number in takes and stream._pending) or number == len(put) - 1:
                taken = await stream.get()
                assert len({(each.request_id, each.index) for each in taken}) == len(taken)
                for each in taken:
                    came[each.request_id, each.index].append(each)
        for key, sequence in zip(keys, sequences, strict=True):
            if interval is not None:
                assert all(len(each.token_ids) >= interval for each in came[key][1:-1])
            else:
                assert len(came[key]) <= 2
            assert joined(came[key]) == joined(sequence)
            assert [each.finish_reason for each in came[key]] == [None] * (len(came[key]) - 1) + [FinishReason.STOP]
            assert all(each.logprobs is None or len(each.logprobs) == len(each.token_ids) for each in came[key]), (
                "a token and its log-probability must be in one delta"
            )

    asyncio.run(run())


def test_fast_reader_gets_unmerged_deltas() -> None:
    async def run() -> None:
        stream = OutputStream()
        for delta in generated("a", 0, 50, logprobs=True):
            assert stream.put(delta), "the reader must be woken"
            [taken] = await stream.get()
            assert taken is delta

    asyncio.run(run())


@pytest.mark.parametrize("interval", [2, 3, None])
def test_a_reader_is_woken_for_the_first_delta_each_interval_and_the_end(interval: int | None) -> None:
    async def run() -> None:
        stream = OutputStream(interval)
        deltas = [OutputDelta("a", "x", [token]) for token in range(10)]
        deltas[-1].finish_reason = FinishReason.STOP
        taken = []
        for number, delta in enumerate(deltas):
            if stream.put(delta):
                [got] = await stream.get()
                taken.append((number, len(got.token_ids)))
        every = [] if interval is None else [(number, interval) for number in range(interval, 9, interval)]
        rest = 9 - sum(count for _, count in every)
        assert taken == [(0, 1), *every, (9, rest)]

    asyncio.run(run())


def test_held_deltas_come_before_an_error() -> None:
    async def run() -> None:
        stream = OutputStream(None)
        stream.put(OutputDelta("a", "x", [1]))
        assert [each.text for each in await stream.get()] == ["x"]
        assert not stream.put(OutputDelta("a", "y", [2]))
        stream.fail(RequestFailedError("it failed"))
        assert [each.text for each in await stream.get()] == ["y"]
        with pytest.raises(RequestFailedError):
            await stream.get()

    asyncio.run(run())


def test_only_the_first_delta_of_an_empty_stream_wakes_the_reader() -> None:
    async def run() -> None:
        stream = OutputStream()
        first, *others = generated("a", 0, 10, logprobs=False)
        reader = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        assert stream.put(first)
        assert not any(stream.put(delta) for delta in others)
        await asyncio.sleep(0)
        assert not reader.done()
        stream.wake()
        assert await reader == [joined([first, *others])]

    asyncio.run(run())


@pytest.mark.parametrize("failed", [True, False])
def test_errors_are_raised_once_after_earlier_deltas(failed: bool) -> None:
    async def run() -> None:
        stream = OutputStream()
        first, second = generated("a", 0, 2, logprobs=False)
        stream.put(first)
        if failed:
            stream.put(OutputDelta("a", "", finish_reason=FinishReason.ERROR, error="no finite numbers"))
        else:
            stream.fail(RequestFailedError("no finite numbers"))
        stream.fail(ValueError("a later one"))
        assert await stream.get() == [first]
        with pytest.raises(RequestFailedError, match="no finite numbers"):
            await stream.get()
        stream.put(second)
        assert await stream.get() == [second], "another consumer could not continue"

    asyncio.run(run())


def test_concurrent_puts_and_gets_lose_nothing() -> None:
    """One step at a time, like the engine's reading thread, with three sequences and a slow reader."""

    async def run() -> None:
        stream, loop = OutputStream(), asyncio.get_running_loop()
        sequences = [generated("a", index, 3000, logprobs=True) for index in range(3)]

        def read_engine() -> None:
            for step in zip(*sequences, strict=True):
                if sum(stream.put(delta) for delta in step):
                    loop.call_soon_threadsafe(stream.wake)

        thread = threading.Thread(target=read_engine)
        thread.start()
        came: list[list[OutputDelta]] = [[], [], []]
        chance = random.Random(0)
        while not all(each and each[-1].finish_reason for each in came):
            for delta in await asyncio.wait_for(stream.get(), 120):
                came[delta.index].append(delta)
            for _ in range(chance.choice([0, 0, 10])):
                await asyncio.sleep(0)
        thread.join()
        assert [joined(each) for each in came] == [joined(each) for each in sequences]

    asyncio.run(run())


def test_errors_are_raised_while_other_requests_continue() -> None:
    async def run() -> None:
        stream = OutputStream()
        stream.put(OutputDelta("a", "before"))
        stream.fail(RequestFailedError("the server stops"))
        stream.put(OutputDelta("b", "after, "))
        assert [delta.text for delta in await stream.get()] == ["before"]
        stream.put(OutputDelta("b", "later, "))
        with pytest.raises(RequestFailedError, match="the server stops"):
            await stream.get()
        stream.put(OutputDelta("b", "again"))
        assert [delta.text for delta in await stream.get()] == ["after, later, again"], (
            "deltas of the other request were lost"
        )

    asyncio.run(run())
