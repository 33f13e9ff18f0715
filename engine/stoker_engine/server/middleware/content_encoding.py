"""Compressed request bodies (``Content-Encoding``): decoded in chunks, to whose total the size limit applies."""

from __future__ import annotations

import zlib
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker_engine.server.errors import handlers

HEADER: Final = "content-encoding"
#: Encoding → `wbits` of zlib.
_FORMATS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}
#: Maximum size of a decoded chunk, in bytes.
_PIECE: Final = 1 << 20


class ContentEncodingMiddleware:
    """Decodes gzip and deflate bodies; answers 415 to unsupported encodings."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        encoding = (
            Headers(scope=scope).get(HEADER, "identity").strip().lower() if scope["type"] == "http" else "identity"
        )
        if encoding == "identity":
            await self._app(scope, receive, send)
            return
        if encoding not in _FORMATS:
            sentence = f"Content-Encoding {encoding[:100]!r} is not supported; send gzip, deflate, or no encoding"
            refusal = HTTPException(415, sentence, headers={"accept-encoding": "gzip, deflate"})
            await handlers.response(refusal, scope)(scope, receive, send)
            return
        scope = {**scope, "headers": list(scope["headers"])}
        headers = MutableHeaders(scope=scope)
        for name in (HEADER, "content-length"):  # both describe the encoded body
            del headers[name]
        await self._app(scope, _Decoded(receive, _FORMATS[encoding]).receive, send)


class _Decoded:
    """A request body that is decoded on demand."""

    def __init__(self, receive: Receive, format: int) -> None:
        self._receive = receive
        self._decoder = zlib.decompressobj(format)
        self._undecoded = b""
        self._more = True
        self._ended = False

    async def receive(self) -> Message:
        """Return the next message, with a decoded chunk of the body."""
        if self._ended:
            return await self._receive()  # http.disconnect
        while self._more and not self._undecoded:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._undecoded, self._more = message.get("body", b""), message.get("more_body", False)
        try:
            piece = self._decoder.decompress(self._undecoded, _PIECE)
        except zlib.error as error:
            raise HTTPException(400, f"the request body does not match its Content-Encoding: {error}") from None
        self._undecoded = self._decoder.unconsumed_tail
        if not self._undecoded and not self._more and len(piece) < _PIECE:
            self._ended = True
            if not self._decoder.eof:
                raise HTTPException(400, "the compressed request body is incomplete")
        return {"type": "http.request", "body": piece, "more_body": not self._ended}
