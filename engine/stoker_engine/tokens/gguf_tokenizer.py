"""GGUF files → tokenizer.json.

A GGUF file contains the vocabulary, token types, special tokens and, for byte-level models, the merges. The rules of
normalization and splitting follow from two names, ``tokenizer.ggml.model`` and ``tokenizer.ggml.pre``, and the
architecture. Unknown names are rejected (a ``pre`` only for byte-level models), because a slightly wrong tokenizer
degrades the output without an error.

Most files of SentencePiece models contain no merges. In these, any two tokens whose concatenation is a token can be
merged; the merge into the token with the higher score (Gemma: the lower id) comes first, and for the same token the one
with the longer left part.

transformers converts in the same way, tens of times slower. The tests compare the two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from stoker_common.errors import ModelError
from stoker_engine.models.gguf.gguf_header import GGUFHeader
from stoker_engine.tokens.gguf_splits import DEFAULT, SPLITTINGS
from stoker_engine.tokens.piece_decoders import BYTE_LEVEL_ALPHABET

_CONTROL, _USER_DEFINED = 3, 4

#: Maximum length of a token, in characters, far beyond real vocabularies: the search for merges takes quadratic time.
_LONGEST_TOKEN = 4096


def convert_gguf(path: Path, folder: Path) -> tokenizers.Tokenizer:
    """Write the tokenizer of GGUF file `path` to `folder`: tokenizer.json, tokenizer_config.json and, if the file has a
    chat template, chat_template.jinja.

    Returns:
        The tokenizer in tokenizer.json.

    Raises:
        ModelError: the file has no tokenizer, or one that is malformed or unsupported.
    """
    try:
        return _convert(path, folder)
    except (ModelError, OSError):
        raise
    except Exception as error:  # metadata may be malformed, and the library raises plain Exception
        raise ModelError(f"cannot read the tokenizer of {path}: {type(error).__name__}: {error}") from error


def _convert(path: Path, folder: Path) -> tokenizers.Tokenizer:
    data = GGUFHeader(path)
    tokens = data.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{path} contains no tokenizer; set --tokenizer")
    if (longest := max(map(len, tokens))) > _LONGEST_TOKEN:
        raise ModelError(f"{path} has a token of {longest} characters; at most {_LONGEST_TOKEN} are supported")
    special = _special_tokens(data, tokens)
    backend = _backend(path, data, tokens, special)
    _add_tokens(backend, data, tokens, special)
    _surround(backend, data, special)
    backend.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    if template := data.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template)
    return backend


def _special_tokens(data: GGUFHeader, tokens: Sequence[str]) -> dict[str, str]:
    ids = {
        "bos_token": data.get("tokenizer.ggml.bos_token_id"),
        "eos_token": data.get("tokenizer.ggml.eos_token_id"),
        "unk_token": data.get("tokenizer.ggml.unknown_token_id"),
        "pad_token": data.get("tokenizer.ggml.padding_token_id"),
    }
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None and token_id < len(tokens)}


def _backend(path: Path, data: GGUFHeader, tokens: Sequence[str], special: Mapping[str, str]) -> tokenizers.Tokenizer:
    kind, architecture = data.get("tokenizer.ggml.model"), data.get("general.architecture", "")
    if kind == "gpt2":
        return _byte_level(path, data, tokens)
    if kind == "llama" and architecture.startswith("gemma"):
        return _gemma(tokens, special)
    if kind == "llama":
        return _llama(data, tokens, special, prefix_by_normalizer=architecture == "phi3")
    raise ModelError(f"{path} has a tokenizer of unsupported type {kind!r}; set --tokenizer to the original tokenizer")


def _byte_level(path: Path, data: GGUFHeader, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    splitting = SPLITTINGS.get(name := _pre_tokenizer(data))
    if splitting is None:
        raise ModelError(
            f"{path}: its tokenizer's splitting rules {name!r} are not supported; set --tokenizer to the original "
            "tokenizer"
        )
    of_byte = {byte: character for character, byte in BYTE_LEVEL_ALPHABET.items()}
    alphabet = set(BYTE_LEVEL_ALPHABET)
    vocab = {
        token if alphabet.issuperset(token) else "".join(of_byte[byte] for byte in token.encode()): token_id
        for token_id, token in enumerate(tokens)
    }
    merges = _pairs(data.get("tokenizer.ggml.merges", ()))
    if not merges:
        raise ModelError(f"{path}: its tokenizer has no merges; set --tokenizer to the original tokenizer")
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=splitting.ignores_merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splitting.expressions),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(data: GGUFHeader) -> str:
    name: str = data.get("tokenizer.ggml.pre") or DEFAULT
    return name


def _gemma(tokens: Sequence[str], special: Mapping[str, str]) -> tokenizers.Tokenizer:
    # The file spells runs of spaces as spaces. Its scores do not follow the order of the merges; the token ids do.
    spelled = ["▁" * len(token) if " " in token and not token.strip() else token for token in tokens]
    vocab = {token: token_id for token_id, token in enumerate(spelled)}
    merges = _merges(vocab, {token: -token_id for token, token_id in vocab.items()})
    backend = _sentencepiece(vocab, merges, special.get("unk_token", "<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    return backend


def _llama(
    data: GGUFHeader, tokens: Sequence[str], special: Mapping[str, str], prefix_by_normalizer: bool
) -> tokenizers.Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if listed_merges := data.get("tokenizer.ggml.merges"):
        merges = _pairs(listed_merges)
    else:
        merges = _merges(vocab, dict(zip(tokens, data.get("tokenizer.ggml.scores", ()), strict=True)))
    backend = _sentencepiece(vocab, merges, special.get("unk_token"))
    prefixed = bool(data.get("tokenizer.ggml.add_space_prefix", True))
    if prefix_by_normalizer:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first" if prefixed else "never", split=False)
    if prefixed:
        strip = decoders.Strip(" ", 1, 0)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
        )
    return backend


def _sentencepiece(vocab: dict[str, int], merges: list[tuple[str, str]], unknown: str | None) -> tokenizers.Tokenizer:
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Return merges as pairs: ``"a b"`` → ("a", "b")."""
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]


def _merges(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose concatenation is a token, in descending order of its score."""
    return [
        (left, right)
        for token in sorted(scores, key=scores.__getitem__, reverse=True)
        for cut in range(len(token) - 1, 0, -1)
        if (left := token[:cut]) in vocab and (right := token[cut:]) in vocab
    ]


def _add_tokens(
    backend: tokenizers.Tokenizer, data: GGUFHeader, tokens: Sequence[str], special: Mapping[str, str]
) -> None:
    """Add tokens that are matched as a whole before splitting: control tokens, which are special, and user-defined
    ones."""
    vocab = backend.get_vocab(with_added_tokens=False)
    types = data.get("tokenizer.ggml.token_type", ())
    control = {token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL} | set(special.values())
    if data.get("general.architecture", "").startswith("gemma"):
        control.add("<mask>")  # the file does not mark it as control, but Gemma's own tokenizer does
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in tokens if token in control and token in vocab]
    )
    backend.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind == _USER_DEFINED and token in vocab and token not in control
        ]
    )


def _surround(backend: tokenizers.Tokenizer, data: GGUFHeader, special: Mapping[str, str]) -> None:
    """Set the special tokens added before and after a prompt."""
    splitting = SPLITTINGS.get(_pre_tokenizer(data))
    default = data.get("tokenizer.ggml.model") == "llama" or (splitting is not None and splitting.begins)
    before = special.get("bos_token") if data.get("tokenizer.ggml.add_bos_token", default) else None
    after = special.get("eos_token") if data.get("tokenizer.ggml.add_eos_token", False) else None
    parts = [*([before] if before else []), "$A", *([after] if after else [])]
    backend.post_processor = processors.TemplateProcessing(
        single=" ".join(parts),
        special_tokens=[(token, backend.token_to_id(token)) for token in (before, after) if token],
    )
