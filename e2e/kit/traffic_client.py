"""A client under constant load: N workers send requests to an endpoint, one after another, and report each.

    python traffic_client.py URL WORKERS API_KEY [LONGEST PAUSE]

It runs in a pod of the cluster and never retries. The lengths of completion prompts have a long-tailed distribution, up
to the model's limit and to LONGEST tokens. Each worker pauses for PAUSE seconds after a request. The program prints one
line of JSON per request:

    {"start", "first", "end": seconds since 1970, "kind", "outcome": "ok" | "failed" | "cut", "error",
     "tokens": chunks of text}

A request "failed" if an error came before any text, and was "cut" if one came later. On SIGTERM the workers finish
their requests, and the last line is {"ended": seconds since 1970}.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from statistics import NormalDist
from typing import Any

from openai import OpenAI

#: Number of requests after which a worker opens a new connection, which the Service may route to another pod.
_REQUESTS_A_CONNECTION = 8
#: Timeout in seconds: the server holds a request for up to 55 s while it restarts a killed engine.
_TIMEOUT_S = 120
_TOKENS = 8
#: Context length if the server does not report one (a gateway does not); every tested model has it.
_LEAST = 2048
#: Log-normal prompt lengths in tokens: half are below 48, 1 in 10 is above 500, 1 in 50 above 2,000.
_LENGTHS = NormalDist(math.log(48), 1.8)
#: Token ids that every model has and that are not special.
_WORDS = range(10, 250)
_MESSAGES: Any = [{"role": "user", "content": "Hello!"}]

_stop = threading.Event()
_print = threading.Lock()


_numbers = itertools.count(1)


def prompt(max_length: int) -> list[int]:
    """Return at most `max_length` token ids.

    Steps of the golden ratio spread the lengths: any 25 consecutive prompts contain one above 800 tokens.
    """
    number = next(_numbers)
    length = round(math.exp(_LENGTHS.inv_cdf(number * 0.618034 % 1)))
    return random.Random(number).choices(_WORDS, k=max(1, min(length, max_length)))


def completion(client: OpenAI, model: Any, longest: int) -> Iterator[tuple[str, str | None]]:
    """Yield text and, at the end, the finish reason."""
    stream = client.completions.create(
        model=model.id,
        prompt=prompt(min(longest, getattr(model, "max_model_len", _LEAST) - _TOKENS)),
        max_tokens=_TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            yield choice.text, choice.finish_reason


def chat(client: OpenAI, model: Any, longest: int) -> Iterator[tuple[str, str | None]]:
    """Like `completion`, for chats."""
    stream: Any = client.chat.completions.create(
        model=model.id, messages=_MESSAGES, max_completion_tokens=_TOKENS, stream=True
    )
    for chunk in stream:
        for choice in chunk.choices:
            yield choice.delta.content or "", choice.finish_reason


def whole(client: OpenAI, model: Any, longest: int) -> Iterator[tuple[str, str | None]]:
    """Like `completion`, without streaming."""
    answer = client.chat.completions.create(model=model.id, messages=_MESSAGES, max_completion_tokens=_TOKENS)
    yield answer.choices[0].message.content or "", answer.choices[0].finish_reason


def ask(kind: str, client: OpenAI, model: Any, longest: int) -> None:
    """Send one request and report it."""
    start, first, chunks, finished, error = time.time(), None, 0, None, ""
    try:
        for text, finish_reason in {"completion": completion, "chat": chat, "whole": whole}[kind](
            client, model, longest
        ):
            first = first or time.time()
            chunks += bool(text)
            finished = finish_reason or finished
    except Exception as problem:  # reported; the test evaluates it
        cause = f" ({problem.__cause__!r})" if problem.__cause__ else ""
        error = f"{type(problem).__name__}: {problem}{cause}"
    if not error and not finished:
        error = "the stream ended without a finish_reason"
    outcome = "ok" if not error else "cut" if chunks else "failed"
    times = {"start": start, "first": first, "end": time.time()}
    record = {**times, "kind": kind, "outcome": outcome, "error": error, "tokens": chunks}
    with _print:
        print(json.dumps(record), flush=True)


def work(url: str, api_key: str, model: Any, kinds: Iterator[str], longest: int, pause: float) -> None:
    """Send requests until stopped."""
    while not _stop.is_set():
        with OpenAI(base_url=url, api_key=api_key, max_retries=0, timeout=_TIMEOUT_S) as client:
            for _ in range(_REQUESTS_A_CONNECTION):
                ask(next(kinds), client, model, longest)
                if _stop.wait(pause):
                    return


def main() -> None:
    url, workers, api_key, *more = sys.argv[1:]
    longest, pause = more or (sys.maxsize, 0)
    signal.signal(signal.SIGTERM, lambda *_: _stop.set())
    with OpenAI(base_url=url, api_key=api_key) as client:
        model = client.models.list().data[0]
    threads = []
    for number in range(int(workers)):
        kinds = itertools.cycle(["completion", "chat", "completion", "whole"])
        for _ in range(number):  # each worker starts with another kind
            next(kinds)
        threads.append(threading.Thread(target=work, args=(url, api_key, model, kinds, int(longest), float(pause))))
        threads[-1].start()
    for thread in threads:
        thread.join()
    print(json.dumps({"ended": time.time()}), flush=True)


if __name__ == "__main__":
    main()
