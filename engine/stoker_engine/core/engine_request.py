"""A validated and tokenized request for the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from stoker_common.block_hash import NO_KEYS, CacheKeys
from stoker_engine.core.adapter import NO_ADAPTER
from stoker_engine.core.grammar import Grammar
from stoker_engine.core.sampling_params import RequestParams


@dataclass(frozen=True)
class EngineRequest:
    """One prompt and the parameters of its outputs.

    Attributes:
        max_tokens: maximum number of tokens of each output.
        seed: seed of the sampler; sequence i draws with seed + i.
        eos_token_ids: tokens that end a sequence, unless the parameters ignore them.
        bad_words: token sequences that must not appear in the output.
        grammar: grammar of the output; None: unconstrained.
        priority: priority under ``--scheduling-policy priority``; lower is served earlier.
        cache_keys: what the request's prefix-cache blocks depend on besides tokens.
        adapter: number of the request's LoRA adapter (`AdapterSource`), or `NO_ADAPTER`. If there is an adapter,
            `cache_keys.root_key` must be set.
        arrival_time: arrival in seconds of the monotonic clock, which all processes of a machine share.
        http_request_id: id of the client's HTTP request, for log lines; None: not from HTTP.
    """

    id: str
    prompt_token_ids: list[int]
    params: RequestParams
    max_tokens: int
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    priority: int = 0
    cache_keys: CacheKeys = NO_KEYS
    adapter: int = NO_ADAPTER
    arrival_time: float = field(default_factory=time.monotonic)
    http_request_id: str | None = None

    @property
    def log_fields(self) -> dict[str, str | None]:
        """The fields of a log record about the request (``extra=``)."""
        return {"request_id": self.http_request_id}

    @property
    def num_sequences(self) -> int:
        """Number of returned sequences."""
        return self.params.n
