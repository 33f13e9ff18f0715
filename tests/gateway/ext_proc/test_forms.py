"""Multipart forms: their text fields are found, and ambiguous forms are refused."""

from __future__ import annotations

import random

import pytest

from stoker_common.errors import RequestError
from stoker_gateway.ext_proc.forms import is_form, text_fields

KIND = "multipart/form-data; boundary=x"


def _part(head: str, value: bytes) -> bytes:
    return b"--x\r\n" + head.encode() + b"\r\n\r\n" + value + b"\r\n"


MODEL = _part('Content-Disposition: form-data; name="model"', b"m")
FILE = _part('Content-Disposition: form-data; name="file"; filename="model"\r\nContent-Type: audio/wav', bytes(300))


def test_text_fields_are_found_among_files() -> None:
    chance = random.Random(0)
    for _ in range(50):
        text = _part('content-disposition: form-data; name="language"', "ü".encode())
        parts = [MODEL, FILE, text]
        chance.shuffle(parts)
        kind = chance.choice([KIND, 'Multipart/Form-Data; charset=utf-8; boundary="x"', KIND + "; charset=utf-8"])
        assert is_form(kind)
        assert text_fields(b"".join(parts) + b"--x--\r\n", kind) == {"model": "m", "language": "ü"}


def test_form_may_have_64_parts() -> None:
    assert text_fields(MODEL + FILE * 63 + b"--x--\r\n", KIND) == {"model": "m"}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (MODEL + MODEL + b"--x--", KIND),
        (_part("Content-Disposition: form-data; name*=utf-8''model", b"m") + b"--x--", KIND),
        (_part('Content-Disposition: form-data; name="a"; name="model"', b"m") + b"--x--", KIND),
        (_part('Content-Disposition: x; name="a"\r\nContent-Disposition: form-data', b"m") + b"--x--", KIND),
        (MODEL, KIND),
        (b"preamble\r\n" + MODEL + b"--x--", KIND),
        (MODEL + b"--x--", "multipart/form-data"),
        (MODEL + b"--x--", "multipart/form-data; boundary=y; boundary=x"),
        (FILE * 65 + b"--x--", KIND),
        (_part('Content-Disposition: form-data; name="a"\r\nX: ' + "a" * 5000, b"m") + b"--x--", KIND),
        (b"--x\r\nno headers\r\n--x--", KIND),
        (b"", KIND),
    ],
)
def test_odd_forms_are_refused(body: bytes, kind: str) -> None:
    with pytest.raises(RequestError):
        text_fields(body, kind)
