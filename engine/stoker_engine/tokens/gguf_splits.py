r"""The splitting rules of byte-level tokenizers, by their name in GGUF: ``tokenizer.ggml.pre``.

The names and rules are llama.cpp's. Expressions are applied one after the other: both the matches and the text between
them become pieces, and the next expression splits each piece further.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Splitting:
    """The rules by which text is split.

    Attributes:
        expressions: regular expressions in Oniguruma's syntax.
        ignores_merges: whether a piece that equals a token becomes that token without applying the merges.
        begins: whether a prompt starts with the begin-of-sequence token if the file does not specify it.
    """

    expressions: tuple[str, ...]
    ignores_merges: bool = False
    begins: bool = False


_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"


def _cased(ending: str, digits: str, before: str = "") -> str:
    """Return an expression whose words are upper-case letters followed by lower-case ones.

    Args:
        ending: expression after a word.
        digits: quantifier of digits in a number's piece; empty: one digit.
        before: appended to both letter classes; may exclude characters from them.
    """
    upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{first}[{upper}{before}]*[{lower}{before}]+{ending}|{first}[{upper}{before}]+[{lower}{before}]*{ending}"
        rf"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_GPT4O = _cased(f"{_ENDINGS}?", "{1,3}")
_DIGIT, _DIGITS, _THREE_DIGITS = r"\p{N}", r"\p{N}+", "[0-9][0-9][0-9]"
#: Digits in threes, counted from the right.
_THOUSANDS = r"\d{1,3}(?=(?:\d{3})*\b)"
_HAN_OR_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_CJK = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
#: Letters that have a case, as listed in DeepSeek's tokenizer.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_JAIS2_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
_ASIAN = "[一-鿿㐀-䶿\uf900-\ufaff぀-ゟ゠-ヿ\uff65-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"

#: Name of the rules if a file specifies none: llama.cpp's `default`.
DEFAULT: Final = "default"

_GROUPS: dict[tuple[str, ...], Splitting] = {
    (DEFAULT,): Splitting((r"[\p{P}$+<=>^~|]+", _GPT2, _DIGITS, _THREE_DIGITS)),
    ("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum", "modern-bert",
     "jina-v1-en", "jina-v2-code", "roberta-bpe", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"):
        Splitting((_GPT2,)),
    ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"):
        Splitting((_DIGIT, _GPT2)),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"):
        Splitting((_LLAMA3,), ignores_merges=True, begins=True),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): Splitting((_LLAMA3,)),
    ("jais-2",): Splitting(
        (rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|\s*[\r\n]+|{_JAIS2_SPACES}|\s{{1,2}}(?!\S)|\s{{1}}",)
    ),
    ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2"):
        Splitting((_QWEN2,)),
    ("qwen35",): Splitting(
        (
            rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
            rf"|{_SPACES}",
        )
    ),
    ("ufakzeka",): Splitting((rf"{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}",)),
    ("laguna",): Splitting((r"[^\n]+|[\n]+", _QWEN2)),
    ("minicpm5",): Splitting(
        (r"\p{N}{1,3}", rf"{_ENDINGS}|{_WORD}|\p{{N}}+|{_SYMBOLS}|{_SPACES}"), ignores_merges=True
    ),
    ("bailingmoe", "bailingmoe2", "llada-moe"): Splitting(
        (rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}|{_SYMBOLS}|\s*[\r\n]|\s+(?!\S)|\s+",)
    ),
    ("seed-coder",): Splitting((rf"{_ENDINGS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    ("exaone-moe",): Splitting(
        (
            rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    ("tekken",): Splitting((_cased("", ""),), ignores_merges=True, begins=True),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): Splitting((_GPT4O,)),
    ("granite-embed-multi-97m",): Splitting((_GPT4O,), ignores_merges=True),
    ("tiny_aya", "cohere2moe"): Splitting((_THOUSANDS, _GPT4O)),
    ("youtu",): Splitting(
        (
            f"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_HAN_OR_KANA}",
            _cased(f"{_ENDINGS}?", ""),
        ),
        ignores_merges=True,
    ),
    ("kimi-k2",): Splitting(
        (r"\p{Han}+", _cased(f"{_ENDINGS}?", "{1,3}", "&&[^\\p{Han}]").replace(r"[\r\n/]*", r"[\r\n]*"))
    ),
    ("superbpe",): Splitting((_DIGITS, r"(?=(\d{3})+(?!\d))")),
    ("deepseek-llm",): Splitting(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
            r"\s+$",
            _CJK,
            _DIGITS,
        )
    ),
    ("deepseek-coder",): Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): Splitting((r"\p{N}{1,3}", _HAN_OR_KANA, _DEEPSEEK3)),
    ("spark2_5",): Splitting(
        (
            r"\p{N}{1,3}",
            _HAN_OR_KANA,
            _DEEPSEEK3.replace(rf"[\r\n]*|{_SPACES}", r"|[\r\n]|\s+(?!\S)|\s+"),
            _DIGIT,
        )
    ),
    ("afmoe",): Splitting((_THOUSANDS, _ASIAN, _DEEPSEEK3)),
    ("falcon",): Splitting((r"[\p{P}$+<=>^~|`]+", _GPT2, _THREE_DIGITS)),
    ("bloom", "poro-chat", "gpt3-finnish"): Splitting((_BLOOM,)),
    ("viking",): Splitting((_BLOOM, _DIGIT)),
    ("chameleon",): Splitting(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            _DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        begins=True,
    ),
}  # fmt: skip

SPLITTINGS: Final[dict[str, Splitting]] = {name: splitting for names, splitting in _GROUPS.items() for name in names}
