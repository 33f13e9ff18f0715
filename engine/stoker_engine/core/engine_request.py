"""A request as it is handed to the engine: checked, tokenized, nothing left to decide."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from stoker_common.block_hash import NO_KEYS, CacheKeys
from stoker_engine.core.adapter import NO_ADAPTER
from stoker_engine.core.grammar import Grammar
from stoker_engine.core.sampling_params import RequestParams


@dataclass(frozen=True)
class EngineRequest:
    """One prompt and what is wanted of it.

    Attributes:
        max_tokens: most tokens of each output; prompt and output fit the model's length.
        seed: the sampler's; sequence i of n draws by it and i.
        eos_token_ids: tokens that end a sequence unless it ignores them.
        bad_words: token sequences that are never completed.
        grammar: what the output must spell; None: anything.
        priority: lower is served earlier under ``--scheduling-policy priority``.
        cache_keys: prefix-cache blocks are shared only where these agree, as far as a block depends on them.
        adapter: number of the adapter that its tokens are computed with (`AdapterSource`); `NO_ADAPTER`: none.
            Where it is set, `cache_keys.root_key` is set, too.
        arrival_time: seconds on the monotonic clock, which all processes of a machine share.
        http_request_id: the id of the HTTP request that it is a part of, for log lines; None: it came by none.
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
        """What a log record about the request carries (``extra=``)."""
        return {"request_id": self.http_request_id}

    @property
    def num_sequences(self) -> int:
        """How many sequences come back."""
        return self.params.n
