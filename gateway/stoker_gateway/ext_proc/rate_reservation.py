"""Reservation of a request's tokens against its key's limits, before the request is sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from stoker_gateway.ext_proc.errors import RateLimitError
from stoker_gateway.ext_proc.request import ModelRequest
from stoker_gateway.keys.key import Key
from stoker_gateway.limits.limiter import Limiter
from stoker_gateway.limits.ratelimit_headers import Denial, Grant


@asynccontextmanager
async def reserved(
    limiter: Limiter, key: Key, request: ModelRequest, clock: Callable[[], float]
) -> AsyncIterator[Grant]:
    """Reserve the tokens that a request may use, and release them if the request is not sent.

    Raises:
        RateLimitError: the request would exceed a limit of the key.
    """
    verdict = await limiter.reserve(key, _tokens(key, request), clock())
    if isinstance(verdict, Denial):
        raise RateLimitError(key.id, verdict)
    try:
        yield verdict
    except BaseException:
        limiter.settle(verdict.id, 0, clock())
        raise


def _tokens(key: Key, request: ModelRequest) -> int:
    """Return the number of tokens to reserve. If the request sets no maximum of output tokens, the default is reduced
    to what the key's limit leaves beside the prompt."""
    limit, tokens = key.limits.tokens_per_minute, request.prompt_tokens + request.max_output_tokens
    if request.has_max_output_tokens or limit is None:
        return tokens
    return max(request.prompt_tokens, min(tokens, limit))
