"""Program of a pod: many kinds of applications that send random requests to an endpoint.

    python client.py URL WORKERS API_KEY SEED PAUSE

Each worker draws its requests from its own seeded generator, and pauses for PAUSE seconds after each. Prompt lengths
have a long tail, up to the model's limit. Output and SIGTERM are as in `traffic_client.py`. A request is "ok" if its
result is as expected:

    plain kinds        a complete response, whole or streamed
    repeated           the same text every time: greedy decoding does not depend on batch, cache or pod
    wrong requests     the expected status, such as 404
    hang-ups           the client disconnects in the middle; no further result is expected
"""

from __future__ import annotations

import json
import math
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from openai import APIStatusError, APITimeoutError, OpenAI

#: Number of requests after which a worker opens a new connection, which the Service may route to another pod.
_REQUESTS_A_CONNECTION = 8
_TIMEOUT_S = 120
#: Size of a refused request, larger than the endpoints' --max-request-bytes.
_TOO_MANY_BYTES = 1_200_000
#: Token ids that every model has and that are not special.
_WORDS = range(10, 250)

_SYSTEM = "You are the stoker of a steam engine. You answer in short sentences, and you never leave the fire alone. "
_TOPICS = ("coal", "water", "pressure", "the whistle", "the boiler", "the night shift", "signals", "rust")
_PROMPTS = ("The three laws of robotics are as follows.", "Water boils at", "Once upon a time", "A steam engine is")

_stop = threading.Event()
_print = threading.Lock()
_answers: dict[str, str] = {}


class NotAsDueError(Exception):
    """A response differs from the expected one."""


class Asking:
    """The requests of one worker, with its client, model and random generator.

    Each method is a kind of request. It yields the text that arrives, and raises if the result is not as expected.
    """

    def __init__(self, url: str, api_key: str, model: Any, dice: random.Random) -> None:
        self.client = OpenAI(base_url=url, api_key=api_key, max_retries=0, timeout=_TIMEOUT_S)
        self.model: str = model.id
        self.max_model_len: int = model.max_model_len
        self.dice = dice

    # Requests of applications.

    def chat(self) -> Iterator[str]:
        answer = self.client.chat.completions.create(
            model=self.model, messages=self._messages(), max_completion_tokens=self._output_length()
        )
        yield answer.choices[0].message.content or ""

    def chat_streamed(self) -> Iterator[str]:
        stream = self.client.chat.completions.create(
            model=self.model, messages=self._messages(), max_completion_tokens=self._output_length(), stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        yield from _texts(stream, lambda choice: choice.delta.content)

    def completion(self) -> Iterator[str]:
        yield self._complete(prompt=self._prompt(), max_tokens=self._output_length(), temperature=1.0).choices[0].text

    def completion_streamed(self) -> Iterator[str]:
        yield from _texts(self._complete(prompt=self._prompt(), max_tokens=self._output_length(), stream=True), _text)

    def long_prompt(self) -> Iterator[str]:
        """Send a long shared prefix with a suffix of its own."""
        prompt = _SYSTEM * self.dice.choice((4, 8, 16)) + self._prompt()
        yield from _texts(self._complete(prompt=prompt, max_tokens=4, stream=True), _text)

    def any_length(self) -> Iterator[str]:
        """Send a prompt: half are shorter than 64 tokens, 1 in 12 is longer than 500, and 1 in 90 longer than 2,000."""
        tokens = self._output_length()
        length = max(1, min(round(self.dice.lognormvariate(math.log(64), 1.5)), self.max_model_len - tokens))
        prompt = self.dice.choices(_WORDS, k=length)
        answer = self._complete(prompt=prompt, max_tokens=tokens, stream=True, n=self.dice.choice((1, 1, 3)))
        yield from _texts(answer, _text)

    def several_choices(self) -> Iterator[str]:
        n = self.dice.choice((2, 3))
        answer = self._complete(prompt=self._prompt(), max_tokens=8, n=n, temperature=1.0, seed=self.dice.randrange(99))
        if len(answer.choices) != n:
            raise NotAsDueError(f"{len(answer.choices)} choices, not {n}")
        yield from map(_text, answer.choices)

    def several_prompts(self) -> Iterator[str]:
        answer = self._complete(prompt=list(_PROMPTS[:3]), max_tokens=4)
        if len(answer.choices) != 3:
            raise NotAsDueError(f"{len(answer.choices)} choices, not 3")
        yield from map(_text, answer.choices)

    def beam_search(self) -> Iterator[str]:
        beams = {"use_beam_search": True, "ignore_eos": True}
        answer = self._complete(prompt=self._prompt(), max_tokens=6, n=3, temperature=0, extra_body=beams)
        yield from map(_text, answer.choices)

    def stop_string(self) -> Iterator[str]:
        stops = ["e", "\n", "the"]
        text = self._complete(prompt=self._prompt(), max_tokens=24, stop=stops).choices[0].text
        if any(stop in text for stop in stops):
            raise NotAsDueError(f"goes on beyond a stop string: {text!r}")
        yield text

    def logprobs(self) -> Iterator[str]:
        choice = self._complete(prompt=self._prompt(), max_tokens=4, logprobs=5).choices[0]
        if not choice.logprobs or not choice.logprobs.token_logprobs:
            raise NotAsDueError("no logprobs")
        yield choice.text

    def scoring(self) -> Iterator[str]:
        """Request the log-probabilities of a prompt, without output tokens."""
        choice = self._complete(prompt=self._prompt(), max_tokens=0, echo=True, logprobs=1).choices[0]
        if not choice.logprobs or len(choice.logprobs.token_logprobs) < 2:
            raise NotAsDueError("no logprobs of the prompt")
        yield choice.text

    def penalties(self) -> Iterator[str]:
        odd = {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "bad_words": ["fire"]}
        yield (
            self._complete(
                prompt=self._prompt(), max_tokens=8, presence_penalty=0.5, frequency_penalty=0.5, extra_body=odd
            )
            .choices[0]
            .text
        )

    def repeated(self) -> Iterator[str]:
        prompt = self.dice.choice(_PROMPTS)
        answer = self._complete(prompt=prompt, max_tokens=8, temperature=0, extra_body={"ignore_eos": True})
        text = answer.choices[0].text
        if text != (before := _answers.setdefault(prompt, text)):
            raise NotAsDueError(f"{prompt!r} was answered with {before!r} and now with {text!r}")
        yield text

    def tokenize(self) -> Iterator[str]:
        got = self._post(str(self.client.base_url.join("/tokenize")), {"model": self.model, "prompt": self._prompt()})
        if got["count"] != len(got["tokens"]):
            raise NotAsDueError(str(got))
        yield str(got["count"])

    # Wrong requests with the expected status.

    def unknown_field(self) -> Iterator[str]:
        return _refused(400, lambda: self._complete(prompt="a", extra_body={"temprature": 1}))

    def wrong_value(self) -> Iterator[str]:
        return _refused(400, lambda: self._complete(prompt="a", temperature=-1))

    def no_such_format(self) -> Iterator[str]:
        """Request a format that does not exist, and expect a refusal."""
        return _refused(400, lambda: self._chat_as({"type": "yaml"}))

    def too_long(self) -> Iterator[str]:
        return _refused(400, lambda: self._complete(prompt=_SYSTEM * 500))

    def too_large(self) -> Iterator[str]:
        return _refused(413, lambda: self._complete(prompt="a" * _TOO_MANY_BYTES))

    def wrong_key(self) -> Iterator[str]:
        stranger = self.client.with_options(api_key="key-of-nobody")
        return _refused(401, lambda: stranger.models.list())

    def no_such_model(self) -> Iterator[str]:
        return _refused(404, lambda: self.client.completions.create(model="another", prompt="a"))

    def no_such_path(self) -> Iterator[str]:
        return _refused(404, lambda: self._post("nowhere", {}))

    # Clients that disconnect.

    def hangs_up_in_stream(self) -> Iterator[str]:
        stream = self._complete(prompt=self._prompt(), max_tokens=64, stream=True, n=self.dice.choice((1, 2)))
        for _, chunk in zip(range(self.dice.randrange(1, 4)), stream, strict=False):
            yield from map(_text, chunk.choices)
        stream.close()

    def hangs_up_before_the_answer(self) -> Iterator[str]:
        hasty = self.client.with_options(timeout=self.dice.choice((0.05, 0.2, 0.5)))
        try:
            hasty.completions.create(model=self.model, prompt=_SYSTEM * 6 + self._prompt(), max_tokens=32)
        except APITimeoutError:
            return
        yield "answered in time"

    # Helpers.

    def _complete(self, **parameters: Any) -> Any:
        return self.client.completions.create(model=self.model, **parameters)

    def _chat_as(self, response_format: Any) -> Any:
        return self.client.chat.completions.create(
            model=self.model, messages=self._messages(), response_format=response_format, max_completion_tokens=4
        )

    def _post(self, path: str, body: Any) -> Any:
        return self.client.post(path, body=body, cast_to=object)

    def _messages(self) -> Any:
        question = f"Tell me about {self.dice.choice(_TOPICS)}."
        return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]

    def _prompt(self) -> str:
        return f"{self.dice.choice(_PROMPTS)} And of {self.dice.choice(_TOPICS)}:"

    def _output_length(self) -> int:
        return self.dice.choice((1, 4, 8, 16))


_USUAL: tuple[Callable[[Asking], Iterator[str]], ...] = (
    Asking.chat, Asking.chat_streamed, Asking.chat_streamed, Asking.completion, Asking.completion_streamed,
    Asking.completion_streamed, Asking.long_prompt, Asking.any_length, Asking.any_length, Asking.any_length,
    Asking.several_choices, Asking.several_prompts, Asking.beam_search, Asking.stop_string, Asking.logprobs,
    Asking.scoring, Asking.penalties, Asking.repeated, Asking.repeated, Asking.tokenize,
)  # fmt: skip
_UNUSUAL: tuple[Callable[[Asking], Iterator[str]], ...] = (
    Asking.unknown_field, Asking.wrong_value, Asking.no_such_format, Asking.too_long, Asking.too_large,
    Asking.wrong_key, Asking.no_such_model, Asking.no_such_path,
    Asking.hangs_up_in_stream, Asking.hangs_up_in_stream, Asking.hangs_up_before_the_answer,
)  # fmt: skip
_SHARE_UNUSUAL = 0.3


def _text(choice: Any) -> str:
    text: str = choice.text
    return text


def _texts(stream: Iterable[Any], text: Callable[[Any], str | None]) -> Iterator[str]:
    """Yield a stream's text until its end."""
    finished = False
    for chunk in stream:
        for choice in chunk.choices:
            yield text(choice) or ""
            finished = finished or bool(choice.finish_reason)
    if not finished:
        raise NotAsDueError("the stream ended without a finish_reason")


def _refused(status: int, ask: Callable[[], object]) -> Iterator[str]:
    """Yield nothing; check that `ask` is answered with this status."""
    try:
        ask()
    except APIStatusError as error:
        if error.status_code != status:
            raise
        return iter(())
    raise NotAsDueError(f"answered, where {status} was due")


def ask(asking: Asking, kind: Callable[[Asking], Iterator[str]]) -> None:
    """Send one request and report it."""
    start, chunks, error = time.time(), 0, ""
    try:
        for text in kind(asking):
            chunks += bool(text)
    except Exception as problem:  # reported; the test evaluates it
        cause = f" ({problem.__cause__!r})" if problem.__cause__ else ""
        error = f"{type(problem).__name__}: {problem}{cause}"
    outcome = "ok" if not error else "cut" if chunks else "failed"
    record = {
        "start": start, "end": time.time(), "kind": kind.__name__.replace("_", " "), "outcome": outcome,
        "error": error, "tokens": chunks,
    }  # fmt: skip
    with _print:
        print(json.dumps(record), flush=True)


def work(url: str, api_key: str, model: Any, dice: random.Random, pause: float) -> None:
    """Send requests until stopped."""
    while not _stop.is_set():
        asking = Asking(url, api_key, model, dice)
        with asking.client:
            for _ in range(_REQUESTS_A_CONNECTION):
                ask(asking, dice.choice(_UNUSUAL if dice.random() < _SHARE_UNUSUAL else _USUAL))
                if _stop.wait(pause):
                    return


def main() -> None:
    url, workers, api_key, seed, pause = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: _stop.set())
    with OpenAI(base_url=url, api_key=api_key) as client:
        model = client.models.list().data[0]
    threads = [
        threading.Thread(target=work, args=(url, api_key, model, random.Random(f"{seed} {number}"), float(pause)))
        for number in range(int(workers))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"ended": time.time()}), flush=True)


if __name__ == "__main__":
    main()
