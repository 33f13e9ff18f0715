"""Tokenizers of every kind, built on the fly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

TEXT = [
    "the quick brown fox jumps over the lazy dog, again and again",
    "emoji 🎉👩‍👩‍👧‍👦 and 漢字かな and कॉम्बाइनिंग é ñ don't do not . ,",
]
SPECIAL = ["<s>", "</s>", "<unk>"]


def make_byte_level() -> Backend:
    """GPT-2, Llama 3, Qwen."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT * 8, trainer)
    backend.add_tokens(["<think>", "日本", AddedToken("<|tool|>", special=True)])
    return backend


def _byte_fallback(decoder: decoders.Decoder) -> Backend:
    pieces = sorted({*"".join(TEXT).replace(" ", "▁"), "▁the", "▁", "▁▁", "▁a", "ing", "🎉", "quick"})
    vocab = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    backend = Backend(models.Unigram([(piece, -float(i)) for i, piece in enumerate(vocab)], 2, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoder
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(["<think>"])
    return backend


def llama() -> Backend:
    """SentencePiece with byte fallback; the first space is stripped."""
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _byte_fallback(decoders.Sequence(parts))


def gemma() -> Backend:
    """SentencePiece with byte fallback; all spaces are kept."""
    return _byte_fallback(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def metaspace() -> Backend:
    """T5."""
    return _byte_fallback(decoders.Metaspace())


def stripped() -> Backend:
    """The start is stripped, of each token and of the text."""
    parts = [decoders.Strip("a", 1, 0), decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    return _byte_fallback(decoders.Sequence(parts))


def word_piece() -> Backend:
    """BERT."""
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(TEXT * 8, trainer)
    return backend


def word_end() -> Backend:
    """CLIP, GPT-1."""
    backend = Backend(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(TEXT * 8, trainer)
    return backend


def no_decoder() -> Backend:
    """Tokens are words."""
    backend = word_piece()
    backend.decoder = None
    return backend


def unstreamable() -> Backend:
    """A decoder that needs the whole text."""
    return _byte_fallback(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Replace(Regex("q.*k"), "Q")])
    )


KINDS: list[Callable[[], Backend]] = [
    make_byte_level, llama, gemma, metaspace, stripped, word_piece, word_end, no_decoder, unstreamable,
]  # fmt: skip


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def backend(request: pytest.FixtureRequest) -> Backend:
    kind: Callable[[], Backend] = request.param
    return kind()


@pytest.fixture(scope="module")
def byte_level() -> Backend:
    """A byte-level tokenizer."""
    return make_byte_level()
