"""LRU cache of grammars in llguidance's format, by constraint. Many requests contain the same schema."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import fields
from typing import Final
from weakref import WeakValueDictionary

from stoker_common.errors import RequestError
from stoker_engine.core.structured_outputs import StructuredOutputs

#: Maximum total size of the cached grammars and errors: their characters, and 100 for each entry.
_MAX_LENGTH: Final = 16 * 2**20


class GrammarCache:
    """Grammars and errors of invalid ones, for one event loop. Concurrent requests for a grammar compile it once."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, str | RequestError] = OrderedDict()
        self._length = 0
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()  # held during compilation

    async def get(
        self, structured: StructuredOutputs, compile_grammar: Callable[[StructuredOutputs], Awaitable[str]]
    ) -> str:
        """Return the grammar of `structured`; compile it on a cache miss.

        Raises:
            RequestError: from `compile_grammar`. The error is cached if the grammar itself is invalid.
        """
        key = await asyncio.to_thread(_key, structured)
        if key not in self._entries:
            lock = self._locks.setdefault(key, asyncio.Lock())
            async with lock:
                if key not in self._entries:
                    try:
                        self._keep(key, await compile_grammar(structured))
                    except RequestError as error:
                        # Errors with a code concern time, memory or load, and may not occur again under less load.
                        if error.code is not None or error.status != RequestError.status:
                            raise
                        self._keep(key, error)
        self._entries.move_to_end(key)
        cached = self._entries[key]
        if isinstance(cached, RequestError):
            raise RequestError(cached.message, cached.param, cached.code)
        return cached

    def _keep(self, key: bytes, result: str | RequestError) -> None:
        self._entries[key] = result
        self._length += _length(result)
        while self._length > _MAX_LENGTH and len(self._entries) > 1:
            self._length -= _length(self._entries.popitem(last=False)[1])


def _length(result: str | RequestError) -> int:
    return len(result if isinstance(result, str) else result.message) + 100


def _key(structured: StructuredOutputs) -> bytes:
    stated = {each.name: getattr(structured, each.name) for each in fields(structured) if each.name != "begins_after"}
    try:
        return hashlib.sha256(json.dumps(stated).encode()).digest()
    except (RecursionError, TypeError, ValueError) as error:
        raise RequestError(f"this is not valid JSON: {error}", f"structured_outputs.{structured.kind}") from None
