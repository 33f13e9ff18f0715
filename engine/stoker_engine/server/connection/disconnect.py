"""A client that hangs up ends its work.

Once a request's body is read, the next message an ASGI server has for us is that the client is gone. So
waiting for it costs nothing, and works the same for streams and for whole answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client hung up; nobody is there to be answered."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Does `work`, or cancels it when the client hangs up.

    However this ends, `work` has ended too: what it held is free.

    Raises:
        ClientGoneError: the client hung up first.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
