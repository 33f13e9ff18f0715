"""Bytes of tokens, compared with the ``tokenizers`` library's decoding."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer as Backend

from stoker_common.errors import RequestError
from stoker_engine.grammar.token_table import TokenTable
from stoker_engine.tokens.tokenizer import Tokenizer

from .conftest import unstreamable, word_end


def test_joined_bytes_equal_the_text(backend: Backend) -> None:
    tokenizer = Tokenizer(backend)
    try:
        words, special = tokenizer.token_table().unpack()
    except RequestError:
        assert any(name in repr(backend.decoder) for name in ("BPEDecoder", "Regex"))
        return
    assert set(special) == tokenizer.special_ids
    assert len(words) == len(tokenizer.tokens)
    rng = random.Random(1)
    tokens = [token_id for token_id in range(len(words)) if token_id not in tokenizer.special_ids]
    prompt = [next(token for token in tokens if words[token].strip().isalpha())]
    compared = 0
    for _ in range(500):
        ids = rng.choices(tokens, k=rng.randrange(1, 8))
        try:
            text = b"".join(words[token] for token in ids).decode()
        except UnicodeDecodeError:
            continue  # no grammar writes that
        before = backend.decode(prompt)
        whole = backend.decode([*prompt, *ids])
        assert whole == before + text
        compared += 1
    assert compared > 50


@pytest.mark.parametrize("kind", [word_end, unstreamable])
def test_tokenizers_without_bytes_per_token_are_refused(kind: type) -> None:
    with pytest.raises(RequestError, match="token by token") as refused:
        Tokenizer(kind()).token_table()
    assert refused.value.param == "structured_outputs"


def test_token_table_is_packed_and_unpacked() -> None:
    words = [b"", b"a", "é".encode(), b"\xff\x00", b"x" * 1000, b"y" * 1001, b"<s>"]
    table = TokenTable.of(words, [6, 0, 99])
    kept = [*words[:5], b"", words[6]]  # the trie is not deep enough for 1001 bytes
    assert table.unpack() == (kept, [0, 6])
    assert TokenTable(bytes(bytearray(table.data))) == table
    assert TokenTable.of([], []).unpack() == ([], [])
