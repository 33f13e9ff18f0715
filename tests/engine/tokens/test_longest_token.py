"""No prompt that fits is refused for its length in characters, with any tokenizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from stoker_common.errors import RequestError
from stoker_engine.tokens.tokenizer import Tokenizer

from .conftest import KINDS, make_byte_level

_BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def _bpe(vocab: dict[str, int] | None = None, **options: object) -> Backend:
    spellings = [*_BYTES, "▁", "a", "aa", "aaaa", "▁a", "é"]
    merges = [("a", "a"), ("aa", "aa"), ("▁", "a")]
    known = vocab or {token: token_id for token_id, token in enumerate(spellings)}
    backend = Backend(models.BPE(vocab=known, merges=[] if vocab else merges, byte_fallback=True, **options))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def sentencepiece() -> Backend:
    backend = _bpe(fuse_unk=True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def composing() -> Backend:
    backend = make_byte_level()
    backend.normalizer = normalizers.NFC()
    return backend


def swallowing() -> Backend:
    backend = make_byte_level()
    backend.add_tokens([AddedToken("<|a|>", lstrip=True, rstrip=True), AddedToken("ﷺ", normalized=True)])
    backend.normalizer = normalizers.NFKC()
    return backend


def unknown_fused() -> Backend:
    return _bpe({"a": 0, "<unk>": 1}, unk_token="<unk>", fuse_unk=True)


def removing() -> Backend:
    backend = make_byte_level()
    split = pre_tokenizers.Split(Regex("b+"), behavior="removed")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    return backend


def shortening() -> Backend:
    backend = make_byte_level()
    backend.normalizer = normalizers.Replace(Regex(" +"), " ")
    return backend


def stripping() -> Backend:
    backend = make_byte_level()
    backend.normalizer = normalizers.Strip()
    return backend


BOUND = [make_byte_level, sentencepiece, composing, swallowing]
BOUNDLESS = [unknown_fused, removing, shortening, stripping]

_pieces = st.sampled_from(
    ["a", "aaaa", " ", "  \n", "b", "漢", "🎉", "\u03b1\u0313\u0300\u0345", "<|a|>", "<think>", "ﷺ", "e\u0301", "\x00"]
)
_texts = st.lists(st.tuples(_pieces, st.integers(1, 60)), max_size=6).map(
    lambda runs: "".join(piece * times for piece, times in runs)
)


@pytest.mark.parametrize("kind", [*BOUND, *BOUNDLESS, *KINDS], ids=lambda kind: kind.__name__)
def test_fitting_texts_are_not_refused(kind: Callable[[], Backend]) -> None:
    tokenizer = Tokenizer(kind())

    @settings(max_examples=150, deadline=None)
    @given(text=_texts | st.text(max_size=40))
    def check(text: str) -> None:
        tokenizer.check_length(text, len(tokenizer.encode(text, add_special_tokens=False)))

    check()


@pytest.mark.parametrize("kind", BOUND, ids=lambda kind: kind.__name__)
def test_too_long_texts_are_refused(kind: Callable[[], Backend]) -> None:
    tokenizer = Tokenizer(kind())
    assert tokenizer.longest_token is not None
    with pytest.raises(RequestError) as error:
        tokenizer.check_length("x" * (100 * tokenizer.longest_token + 1), 100)
    assert error.value.code == "context_length_exceeded"


@pytest.mark.parametrize("kind", BOUNDLESS, ids=lambda kind: kind.__name__)
def test_tokenizers_with_unbounded_tokens_have_no_limit(kind: Callable[[], Backend]) -> None:
    assert Tokenizer(kind()).longest_token is None
