"""Limits of one gateway, compared with their definition: sums over a list of all grants."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_gateway.keys.key import Key, Limits
from stoker_gateway.limits import ledger as ledgers
from stoker_gateway.limits.ledger import LONGEST_S, Ledger
from stoker_gateway.limits.limiter import LocalLimiter
from stoker_gateway.limits.ratelimit_headers import Denial, Grant, duration


@dataclass
class Granted:
    """A granted request of the reference."""

    id: str
    at: float
    tokens: int
    ended: bool = False


def key(requests: int | None = None, tokens: int | None = None, concurrency: int | None = None, name: str = "k") -> Key:
    return Key(name, "", limits=Limits(requests, tokens, concurrency))


def reserve(limiter: LocalLimiter, of: Key, tokens: int, now: float) -> Grant | Denial:
    """Reserve; without peers nothing needs to be awaited."""
    with pytest.raises(StopIteration) as ended:
        limiter.reserve(of, tokens, now).send(None)
    verdict: Grant | Denial = ended.value.value
    return verdict


STEPS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.001, 0.3, 0.999, 1.0, 7.5, 29.0, 59.5, 60.0, 61.0, 400.0]),
        st.one_of(st.integers(0, 60), st.just(101)),
        st.integers(0, 100),  # percentage of its tokens that the oldest open request used when it ends; 0: none ends
    ),
    max_size=120,
)


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from([0.0, 1234.567, 9e8]),
    st.one_of(st.none(), st.integers(0, 12)),
    st.one_of(st.none(), st.integers(0, 100)),
    st.one_of(st.none(), st.integers(0, 3)),
    STEPS,
)
def test_limits_hold_in_every_minute_without_needless_refusals(
    now: float, requests: int | None, tokens: int | None, concurrency: int | None, steps: list[tuple[float, int, int]]
) -> None:
    limiter, of, granted = LocalLimiter(), key(requests, tokens, concurrency), list[Granted]()
    for wait, amount, ends in steps:
        now += wait
        if ends and (open_ := [each for each in granted if not each.ended]):
            open_[0].ended = True
            used = open_[0].tokens * ends // 100
            limiter.settle(open_[0].id, used, now)
            if now - open_[0].at < 60:  # older grants are forgotten
                open_[0].tokens = used
        verdict = reserve(limiter, of, amount, now)
        counts = [each for each in granted if now - each.at < 60]  # must count
        may_count = [each for each in granted if now - each.at <= 61]
        under_way = sum(not each.ended for each in granted)

        def fits(past: list[Granted], busy: int = under_way, want: int = amount) -> bool:
            return (
                (requests is None or len(past) + 1 <= requests)
                and (tokens is None or sum(each.tokens for each in past) + want <= tokens)
                and (concurrency is None or busy + 1 <= concurrency)
            )

        if isinstance(verdict, Grant):
            assert fits(counts)
            granted.append(Granted(verdict.id, now, amount))
        else:
            assert not fits(may_count)
        standing = verdict.standing
        assert (standing.requests is None) == (requests is None)
        assert (standing.tokens is None) == (tokens is None)
        if standing.tokens is not None and tokens is not None:
            highest = tokens - sum(each.tokens for each in granted if now - each.at < 60)
            lowest = tokens - sum(each.tokens for each in granted if now - each.at <= 61)
            assert max(0, lowest) <= standing.tokens.remaining <= max(0, highest)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 40)), min_size=1, max_size=30), st.integers(1, 60))
def test_retry_after_is_the_earliest_time_that_succeeds(steps: list[tuple[float, int]], amount: int) -> None:
    limiter, of, now = LocalLimiter(), key(tokens=60), 1000.0
    for wait, tokens in steps:
        now += wait
        reserve(limiter, of, tokens, now)
    verdict = reserve(limiter, of, amount, now)
    if isinstance(verdict, Grant):
        return
    assert verdict.retry_after_s is not None and 0 < verdict.retry_after_s <= 61
    before, then = now + verdict.retry_after_s - 0.01, now + verdict.retry_after_s + 1e-6
    if before > now:
        assert isinstance(reserve(limiter, of, amount, before), Denial)
    assert isinstance(reserve(limiter, of, amount, then), Grant)


def test_sustained_load_uses_the_limit_and_never_exceeds_it() -> None:
    limiter, of, random_ = LocalLimiter(), key(requests=300), random.Random(18)
    now, granted = 5000.0, list[float]()
    while now < 5400:
        now += random_.expovariate(20)  # four times the limit
        if isinstance(reserve(limiter, of, 1, now), Grant):
            granted.append(now)
    for begin in granted:
        assert sum(begin <= at < begin + 60 for at in granted) <= 300
    assert len(granted) >= 0.9 * 300 * 400 / 60


def test_unused_tokens_are_returned_and_excess_tokens_are_charged() -> None:
    limiter, of = LocalLimiter(), key(tokens=100)
    first = reserve(limiter, of, 100, 0.0)
    assert isinstance(first, Grant)
    assert isinstance(reserve(limiter, of, 1, 1.0), Denial)
    limiter.settle(first.id, 30, 2.0)
    limiter.settle(first.id, 0, 2.0)  # a second settlement has no effect
    limiter.settle("unheard of", 0, 2.0)
    second = reserve(limiter, of, 70, 3.0)
    assert isinstance(second, Grant)
    assert isinstance(reserve(limiter, of, 1, 3.0), Denial)
    limiter.settle(second.id, 90, 50.0)
    # The first has expired at 61, the second's 70 at 64; the 20 unreserved tokens count from 50 on.
    refused = reserve(limiter, of, 100, 70.0)
    assert isinstance(refused, Denial) and (refused.used, refused.limit, refused.requested) == (20, 100, 100)
    assert isinstance(reserve(limiter, of, 100, 111.0), Grant)
    third = reserve(limiter, key(tokens=100, name="other"), 100, 0.0)
    assert isinstance(third, Grant)  # keys are counted separately
    limiter.settle(third.id, None, 1.0)  # unknown usage: the reservation counts
    assert isinstance(reserve(limiter, key(tokens=100, name="other"), 1, 1.0), Denial)


@pytest.mark.parametrize("of", [key(tokens=10), key(requests=0), key(concurrency=0)])
def test_requests_beyond_the_whole_limit_have_no_retry_after(of: Key) -> None:
    verdict = reserve(LocalLimiter(), of, 11, 0.0)
    assert isinstance(verdict, Denial) and verdict.retry_after_s is None


def test_slot_of_an_unsettled_request_is_released_in_the_end() -> None:
    limiter, of = LocalLimiter(), key(concurrency=2)
    grants = [reserve(limiter, of, 1, 0.0), reserve(limiter, of, 1, 10.0)]
    assert isinstance(reserve(limiter, of, 1, LONGEST_S), Denial)
    assert isinstance(reserve(limiter, of, 1, LONGEST_S + 1), Grant)
    assert isinstance(reserve(limiter, of, 1, LONGEST_S + 1), Denial)
    assert isinstance(grants[0], Grant)
    limiter.settle(grants[0].id, 1, LONGEST_S + 2)  # late: its slot was released already
    assert isinstance(reserve(limiter, of, 1, LONGEST_S + 2), Denial)


def test_ended_requests_and_idle_keys_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "MAX_GRANTS", 100)
    ledger = Ledger()
    for number in range(5000):
        ledger.begin(str(number), f"key {number}", 5, float(number))
        ledger.use("another", float(number))
        assert len(ledger) < 300 and ledger.num_active <= 100
    for number in range(5000):
        ledger.end(str(number), 5, 5000.0)
    ledger.use("another", 5200.0)
    assert len(ledger) == ledger.num_active == 0


def test_clock_that_goes_back_admits_no_additional_request() -> None:
    limiter, of = LocalLimiter(), key(requests=1)
    assert isinstance(reserve(limiter, of, 1, 100.0), Grant)
    for now in (99.0, 0.0, 100.0, 160.9):
        assert isinstance(reserve(limiter, of, 1, now), Denial)
    assert isinstance(reserve(limiter, of, 1, 161.0), Grant)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.012, "12ms"),
        (0.9991, "1s"),
        (1, "1s"),
        (8.64, "8.64s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (90.951, "1m30.951s"),
        (3600, "1h0m0s"),
        (7325.5, "2h2m5.5s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_headers_are_openais_and_absent_without_a_limit() -> None:
    limiter = LocalLimiter()
    headers = reserve(limiter, key(requests=3, tokens=100), 40, 1000.25).standing.headers()
    assert headers == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "1m0.75s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "60",
        "x-ratelimit-reset-tokens": "1m0.75s",
    }
    assert reserve(limiter, key(name="free"), 9, 0.0).standing.headers() == {}
