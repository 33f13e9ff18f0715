"""A GET request with limits on its duration and on the received bytes, for untrusted servers."""

from __future__ import annotations

import asyncio

import aiohttp


async def fetch(url: str, seconds: float, max_bytes: int) -> bytes | None:
    """Return the body of a successful response. Redirects are not followed, and the body is not decompressed.

    Args:
        seconds: limit of the time from the start of the request to the end of the response.
        max_bytes: maximum size of the body.

    Returns:
        The body; None if there is no complete response in time, its status is not 200, or its body is too large.
    """
    try:
        async with asyncio.timeout(seconds), aiohttp.ClientSession(auto_decompress=False) as session:
            # A pod's certificate is not issued for its address, and the responses are not confidential.
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
