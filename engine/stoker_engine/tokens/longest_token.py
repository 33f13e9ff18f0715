"""Upper bound of the number of characters of a text that one token represents.

It is used to reject prompts that are far too long before they are encoded, so it must never be too small. A character
is spelled as itself or as one or more bytes, so a token represents at most as many characters as its spelling has, if

- no normalizer or pre-tokenizer removes characters;
- every byte has a token, because a single unknown token could represent a whole text.

Unicode's composition multiplies the bound by four (U+1F82: α, two accents and iota); if a normalizer combines
characters in another way, there is no bound.

Added tokens may absorb any amount of white space around them; in that case white space is not counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from stoker_engine.tokens.piece_decoders import BYTE_LEVEL_ALPHABET

#: Normalizer → maximum number of characters that it combines into one.
_NORMALIZERS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_PRE_TOKENIZERS = ("ByteLevel", "Metaspace", "Digits", "Split", "Punctuation")


def longest_token(backend: tokenizers.Tokenizer) -> tuple[int | None, bool]:
    """Return the bound of a tokenizer.

    Returns:
        (maximum number of characters per token, None if there is no bound; whether white space is not counted).
    """
    factor = 1
    normalizers = list(_parts(backend.normalizer))
    for part in normalizers:
        if part["type"] == "Replace" and 1 <= len(part["pattern"].get("String", "")) <= len(part["content"]):
            continue
        if part["type"] not in _NORMALIZERS:
            return None, False
        factor *= _NORMALIZERS[part["type"]]
    pre_tokenizers = list(_parts(backend.pre_tokenizer))
    if any(part["type"] not in _PRE_TOKENIZERS or part.get("behavior") == "Removed" for part in pre_tokenizers):
        return None, False
    byte_level = any(part["type"] == "ByteLevel" for part in (*normalizers, *pre_tokenizers))
    vocab = backend.get_vocab(with_added_tokens=False)
    if not _spells_everything(backend.model, vocab, byte_level):
        return None, False
    added = backend.get_added_tokens_decoder().values()
    spellings = [*vocab, *(token.content for token in added)]
    if backend.normalizer is not None:  # added tokens may be matched, normalized, in the normalized text
        spellings += [backend.normalizer.normalize_str(token.content) for token in added]
    return factor * max(map(len, spellings)), any(token.lstrip or token.rstrip for token in added)


def _spells_everything(model: Any, vocab: Mapping[str, int], byte_level: bool) -> bool:
    if type(model).__name__ != "BPE" or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if byte_level:
        return vocab.keys() >= BYTE_LEVEL_ALPHABET.keys()
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))


def _parts(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a normalizer or pre-tokenizer as in tokenizer.json, with sequences flattened."""
    if part is not None:
        yield from _flat(json.loads(part.__getstate__()))


def _flat(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if state["type"] != "Sequence":
        yield state
        return
    for inner in state.get("normalizers") or state.get("pretokenizers") or ():
        yield from _flat(inner)
