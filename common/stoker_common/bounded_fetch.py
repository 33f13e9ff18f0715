"""A GET request whose response is not trusted: bounded in bytes, as they are received, and in time."""

from __future__ import annotations

import asyncio

import aiohttp


async def fetch(url: str, seconds: float, max_bytes: int) -> bytes | None:
    """The body of a successful response.

    No redirect is followed, and nothing is decompressed.

    Args:
        seconds: from the start of the request to the end of the response.
        max_bytes: of the body.

    Returns:
        None if there is no response in time, its status is not 200, or its body is longer.
    """
    try:
        async with asyncio.timeout(seconds), aiohttp.ClientSession(auto_decompress=False) as session:
            # The certificate of a pod is not made for its address, and the responses are no secret.
            request = session.get(url, headers={"Accept-Encoding": "identity"}, allow_redirects=False, ssl=False)
            async with request as response:
                if response.status != 200:
                    return None
                body = bytearray()
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > max_bytes:
                        return None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None
    return bytes(body)
