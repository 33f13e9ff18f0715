"""Lines, however the bytes are split."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator

from stoker_engine.cli.lines import lines_of, stream_lines

ENDS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r"


def test_lines_end_at_line_feeds_however_bytes_are_split() -> None:
    chance = random.Random(0)
    for _ in range(200):
        texts = ["".join(chance.choices(f"ab ü🎉{ENDS}", k=chance.randrange(9))) for _ in range(5)]
        events = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
        stream = "".join(event + chance.choice(("\n", "\r\n", "\n\n")) for event in events).encode()
        stream = stream.rstrip() if chance.random() < 0.5 else stream
        cuts = sorted(chance.choices(range(len(stream) + 1), k=chance.randrange(6)))
        pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

        async def coming(pieces: list[bytes] = pieces) -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        async def collected() -> list[str]:
            return [line async for line in stream_lines(coming())]

        found = list(lines_of(pieces))
        assert [json.loads(line)["text"] for line in found if line] == texts
        assert asyncio.run(collected()) == found
