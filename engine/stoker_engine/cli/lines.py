"""Lines of event streams and of JSON Lines, which end at a line feed and nowhere else.

``str.splitlines`` and httpx's ``iter_lines`` also end lines at U+2028, U+2029, U+0085, form feeds and more, all of
which JSON may hold as they are.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator


def lines_of(pieces: Iterable[bytes]) -> Iterator[str]:
    """The lines of bytes that come in pieces, without their ends; the last one may have none."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from map(_text, whole)
    if rest:
        yield _text(rest)


async def lines_as_they_come(pieces: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """`lines_of`, of pieces that are waited for."""
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield _text(line)
    if rest:
        yield _text(rest)


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode(errors="replace")
