"""Pre-tokenizers by GGUF's names, compared with transformers' tokenizers of families, or with published ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Split

from stoker_engine.tokens.gguf_splits import DEFAULT, SPLITTINGS
from stoker_engine.tokens.tokenizer import Tokenizer

from .test_tokenizer import ODD, _byte_level_gguf

LETTERS = "abZéßſǅΩжД漢字かなカ한글ไทยसंस्कृ\u0301\u1fbe"
OTHERS = "  \n\r\n\t\u3000'''.,!?…。，、-/$+<=>^~|`\"#&()[]{}_;:@%*\\€🎉–“”’〜！"
DIGITS = "0123456789٣७"
ENDINGS = ["'s", "'LL", "'re", " the", "don't", "HelloWorld", "   ", "\n\n  ", "\r\n", "1234567", " 12"]


def drawn(count: int, digits: bool = True) -> list[str]:
    """Return texts with all kinds of characters."""
    chance = random.Random(3)
    pieces = [*LETTERS * 2, *OTHERS, *(DIGITS if digits else ""), *(e for e in ENDINGS if digits or e.isascii())]
    pieces = [piece for piece in pieces if digits or not any(map(str.isdigit, piece))]
    return ["".join(chance.choices(pieces, k=chance.randrange(1, 30))) for _ in range(count)]


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return Stoker's pre-tokenizer."""
    splits = [Split(Regex(expression), "isolated") for expression in SPLITTINGS[name].expressions]
    return pre_tokenizers.Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


def of_class(name: str) -> PreTokenizer:
    """Return the pre-tokenizer of transformers' class for a family."""
    import transformers

    made: PreTokenizer = getattr(transformers, name)().backend_tokenizer.pre_tokenizer
    return made


def tiktokens() -> PreTokenizer:
    """Return transformers' pre-tokenizer for tiktoken's tokenizers, such as Llama 3's."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    return pre_tokenizers.Sequence(
        [Split(Regex(TikTokenConverter().pattern), "isolated"), ByteLevel(False, use_regex=False)]
    )


def published(*parts: str | PreTokenizer) -> PreTokenizer:
    """Return the pre-tokenizer of a tokenizer.json, composed of expressions and other pre-tokenizers."""
    made = [Split(Regex(part), "isolated") if isinstance(part, str) else part for part in parts]
    return pre_tokenizers.Sequence([*made, ByteLevel(add_prefix_space=False, use_regex=False)])


REFERENCES: dict[str, Callable[[], PreTokenizer]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "jais", "exaone4"), lambda: of_class("GPT2Tokenizer")),
    **dict.fromkeys(("qwen2", "megrez", "stablelm2", "grok-2"), lambda: of_class("Qwen2Tokenizer")),
    "qwen35": lambda: of_class("Qwen3_5Tokenizer"),
    **dict.fromkeys(("command-r", "starcoder", "smollm", "refact", "exaone"), lambda: of_class("CohereTokenizer")),
    **dict.fromkeys(("llama-bpe", "glm4", "chatglm-bpe", "dbrx", "smaug-bpe", "falcon3"), tiktokens),
    "bloom": lambda: published(r" ?[^(\s|[.,!?…。，、।۔،])]+"),
    "deepseek-coder": lambda: published(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", Digits(True)),
    "falcon": lambda: pre_tokenizers.Sequence([Punctuation("contiguous"), ByteLevel(False)]),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_text_is_split_as_by_the_reference(name: str) -> None:
    found, expected = pre_tokenizer(name), REFERENCES[name]()
    # Falcon's reference also splits at digits, which its vocabulary never combines with other characters.
    for text in drawn(300, digits=name != "falcon"):
        assert found.pre_tokenize_str(text) == expected.pre_tokenize_str(text), text


@pytest.mark.parametrize("name", SPLITTINGS)
def test_splits_lose_no_character(name: str) -> None:
    splits = [Split(Regex(expression), "isolated") for expression in SPLITTINGS[name].expressions]
    for text in drawn(40):
        assert "".join(piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)) == text


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("deepseek-llm", "under 12 漢字x", ["under", " ", "12", " ", "漢字", "x"]),
        ("deepseek-v3", "a12345漢字", ["a", "123", "45", "漢字"]),
        ("tiny_aya", "n1234567", ["n", "1", "234", "567"]),
        ("superbpe", "1234567", ["1", "234", "567"]),
        ("afmoe", "x12345", ["x", "12", "345"]),
        ("kimi-k2", "漢字Ab12345", ["漢字", "Ab", "123", "45"]),
        ("viking", "a12", ["a", "1", "2"]),
        (DEFAULT, "a, 1234", ["a", ",", " ", "123", "4"]),
    ],
)
def test_digits_and_scripts_are_split_into_their_pieces(name: str, text: str, pieces: list[str]) -> None:
    splits = [Split(Regex(expression), "isolated") for expression in SPLITTINGS[name].expressions]
    assert [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("name", [DEFAULT, "glm4", "deepseek-v3", "falcon", "bloom", "llama-bpe"])
def test_tokenizers_of_files_with_a_named_split_round_trip(
    name: str, byte_level: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    tokenizer = Tokenizer.load(_byte_level_gguf(name, tmp_path / "model.gguf", byte_level))
    for text in ODD:
        assert tokenizer.decode(tokenizer.encode(text, False), False) == text


def test_file_without_a_named_split_has_the_default(
    byte_level: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    named = Tokenizer.load(_byte_level_gguf(DEFAULT, tmp_path / "named.gguf", byte_level))
    unnamed = Tokenizer.load(_byte_level_gguf("", tmp_path / "unnamed.gguf", byte_level))
    for text in drawn(50):
        assert named.encode(text) == unnamed.encode(text)
