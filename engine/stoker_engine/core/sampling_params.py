"""How the tokens of one request are chosen, with vLLM's and OpenAI's names."""

from __future__ import annotations

from dataclasses import dataclass

from stoker_engine.contract.errors import RequestError


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    Attributes:
        temperature: 0 is greedy; above, the logits are divided by it.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: keep this many of the likeliest tokens; 0 or -1 keeps all.
        seed: makes the output reproducible, alone or in any batch; None draws afresh.
        max_tokens: most tokens to generate; None: up to the model's length.
        stop: strings that end the output; they are not part of it.
        stop_token_ids: tokens that end the output; they are not part of its text.
        ignore_eos: keep going past the model's end-of-sequence token.

    Raises:
        RequestError: a value is out of range; `param` names it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if not 0 <= self.temperature < float("inf"):
            raise RequestError(f"temperature must be a number from 0, got {self.temperature}", "temperature")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1, got {self.top_p}", "top_p")
        if self.top_k < -1:
            raise RequestError(f"top_k must be -1 or 0 (all) or at least 1, got {self.top_k}", "top_k")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {self.max_tokens}", "max_tokens")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise RequestError("seed must fit in a signed 64-bit integer", "seed")
        if not all(self.stop):
            raise RequestError("stop must not hold an empty string", "stop")


def _as_tuple(stop: str | tuple[str, ...] | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)
