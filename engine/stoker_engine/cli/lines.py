"""Lines of event streams and of JSON Lines. Only a line feed ends a line.

``str.splitlines`` and httpx's ``iter_lines`` also split at U+2028, U+2029, U+0085, form feeds and more, which JSON may
contain unescaped.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator


def lines_of(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of bytes that arrive in pieces, without line feed or CR LF, which the last line may lack."""
    partial_line = b""
    for piece in pieces:
        *whole, partial_line = (partial_line + piece).split(b"\n")
        yield from map(_text, whole)
    if partial_line:
        yield _text(partial_line)


async def stream_lines(pieces: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """Yield the lines of asynchronous pieces, as `lines_of` does."""
    partial_line = b""
    async for piece in pieces:
        *whole, partial_line = (partial_line + piece).split(b"\n")
        for line in whole:
            yield _text(line)
    if partial_line:
        yield _text(partial_line)


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode(errors="replace")
