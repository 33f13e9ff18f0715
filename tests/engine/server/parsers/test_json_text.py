"""The end of a JSON value and its members, compared with Python's own parser."""

from __future__ import annotations

import json
import random

import pytest

from stoker_engine.server.fields.json_text import JSONScanner, NotJSONError, members, parsed

from .drawn_calls import draw_text, draw_value


def scan(text: str, draw: random.Random) -> int | None:
    """Return the end of the value, or None if it is incomplete; raise what the scanner raises."""
    scanner, at = JSONScanner(), 0
    while at < len(text) and not scanner.ended:
        end = at + draw.choice((1, 1, 2, 5, 1000))
        piece = text[at:end]
        read = scanner.feed(piece)
        assert scanner.ended or read == len(piece)
        at += read
    return at if scanner.ended else None


def test_the_scanner_finds_the_end_that_pythons_decoder_finds() -> None:
    draw = random.Random(0)
    for number in range(1_500):
        value = draw.choice(({"a": draw_value(draw)}, [draw_value(draw)], {}, []))
        written = json.dumps(value, ensure_ascii=draw.random() < 0.5, indent=draw.choice((None, None, 1)))
        if number % 3:  # otherwise unchanged
            at = draw.randrange(len(written))
            written = (
                written[:at] + draw.choice(("", draw_text(draw), written[at] * 2)) + written[at + draw.randint(0, 1) :]
            )
        text = written + draw_text(draw)
        begin = len(text) - len(text.lstrip(" \t\r\n"))
        try:
            _, end = json.JSONDecoder(parse_constant=parsed).raw_decode(text, begin)
        except ValueError:
            end = None
        if end is not None and text[begin] in "{[":
            assert scan(text, draw) == end
            continue
        try:  # it is incomplete, or invalid, perhaps only to a parser of the whole value
            found = scan(text, draw)
        except NotJSONError:
            continue
        if found is not None:
            with pytest.raises(NotJSONError):
                parsed(text[:found])


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ('{"a": 1,}', 8), ("{1", 1), ('{"a" "b"', 5), ("[1}", 2), ('{"a": "\n', 7), ('["\\x', 3), ("[1 2", 3),
        ("1", 0), ('"a"', 0), ("", None), ("[" * 300, 200), ('{"a": [1, <', 10), ("[,", 1), ('{"a": NaN', 6),
    ],
)  # fmt: skip
def test_invalid_json_is_detected_at_the_first_wrong_character(text: str, at: int | None) -> None:
    for pieces in ([text], list(text)):
        scanner, read = JSONScanner(), 0
        try:
            for piece in pieces:
                read += scanner.feed(piece)
        except NotJSONError as error:
            assert read + error.args[0] == at
        else:
            assert at is None


def test_members_are_the_written_text() -> None:
    draw = random.Random(1)
    for _ in range(500):
        value = {draw_text(draw): draw_value(draw) for _ in range(draw.randrange(5))}
        text = json.dumps(
            value, indent=draw.choice((None, 2)), separators=draw.choice((None, (",", ":"), (" , ", " : ")))
        )
        found = members(f" {text}\n")
        assert {key: json.loads(written) for key, written in found.items()} == value
        assert all(written in text and written == written.strip() for written in found.values())
    assert members('{"a": 1.0, "a": 1e2 }') == {"a": "1e2"}


@pytest.mark.parametrize(
    "text", ["[1]", "{", "", '{"a": NaN}', '{"a": -Infinity}', "{} {}", "[" * 100_000, "1" * 5_000]
)
def test_text_that_is_no_object_has_no_members(text: str) -> None:
    with pytest.raises(NotJSONError):
        members(text)
