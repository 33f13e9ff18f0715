"""Tokens → text, a token at a time: the decoders of the ``tokenizers`` library as streams.

A fast tokenizer decodes by a chain of decoders. Each maps a list of token strings to another list; the last list is
joined. Most decoders are local: the result for a token depends on the tokens beside it. These are implemented as *piece
decoders*, which receive one piece at a time and return the text that can no longer change:

    byte-level      bytes of a character are held until it is complete (GPT-2, Llama 3, Qwen)
    byte fallback   ``<0xE2>`` tokens are held until the end of their run, which one invalid byte invalidates (Gemma)
    strip           the first space of the text is not emitted (Llama 2)
    metaspace       ``▁`` is a space, which is not emitted for the first token (T5)
    word piece      a space precedes each token that does not continue a word (BERT)
    bpe             the end of a word becomes a space once another token follows (CLIP)

After a decoder that fuses, later decoders see the whole text as a single token; `piece_decoders` accounts for that. If
a decoder is unknown, or the order of the decoders cannot be streamed, all text is emitted at the end, late but correct.

The joined pieces always equal ``Tokenizer.decode`` of all tokens; the tests compare the two.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol


class PieceDecoder(Protocol):
    """A decoder as a stream."""

    def add(self, piece: str) -> str | list[str]:
        """Add a token. Return the pieces that can no longer change (a plain string: one piece)."""
        ...

    def end(self) -> list[str]:
        """Return the remaining pieces after the last token."""
        ...

    def mark_emitted(self) -> None:
        """Mark the tokens so far as an emitted prompt: keep only the part that the next token may still change."""
        ...


def write_through(decoders: Iterable[PieceDecoder], pieces: list[str]) -> str:
    """Pass pieces through the decoders in order. Return the text that can no longer change."""
    for decoder in decoders:
        pieces = [out for piece in pieces for out in _as_list(decoder.add(piece))]
    return "".join(pieces)


def _as_list(pieces: str | list[str]) -> list[str]:
    return [pieces] if isinstance(pieces, str) else pieces


def piece_decoders(decoder: Mapping[str, Any] | None, decode: Callable[[list[str]], str]) -> list[PieceDecoder]:
    """Return new piece decoders for the ``decoder`` of a tokenizer.json.

    Args:
        decoder: None: tokens are joined by spaces.
        decode: the decoder itself (token strings → text), used if it cannot be streamed.
    """
    if decoder is None:
        return [Spaced()]
    chain: list[PieceDecoder] = []
    fused = False
    for part in _flat(decoder):
        kind = part["type"]
        if kind == "Fuse":
            fused = True
            continue
        made = _fused_decoder(part) if fused else _decoder(part)
        if made is None:
            return [Whole(decode)]
        chain.append(made)
        fused = fused or kind == "ByteLevel"
    return chain


def _flat(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [part for inner in decoder["decoders"] for part in _flat(inner)]


def _decoder(part: Mapping[str, Any]) -> PieceDecoder | None:
    """Return the piece decoder of a decoder that no fusing one precedes in the chain; None: it cannot be streamed."""
    match part["type"]:
        case "ByteLevel":
            return ByteLevel()
        case "ByteFallback":
            return ByteFallback()
        case "Replace" if "String" in part["pattern"]:
            return Replace(part["pattern"]["String"], part["content"])
        case "Metaspace":
            return Metaspace(part["replacement"], part.get("prepend_scheme", "always") != "never")
        case "Strip" if not part["stop"]:
            return StripEach(part["content"], part["start"])
        case "WordPiece":
            return WordPiece(part["prefix"], part["cleanup"])
        case "BPEDecoder":
            return WordEnd(part["suffix"])
    return None


def _fused_decoder(part: Mapping[str, Any]) -> PieceDecoder | None:
    """Return the piece decoder of a decoder that follows a fusing one in the chain; None: it cannot be streamed."""
    match part["type"]:
        case "Strip" if not part["stop"]:
            return StripText(part["content"], part["start"])
        case "Replace" if len(part["pattern"].get("String", "")) == 1:
            return Replace(part["pattern"]["String"], part["content"])
    return None


class _Local:
    """Base class with an `end` and a `mark_emitted` that do nothing."""

    def end(self) -> list[str]:
        return []

    def mark_emitted(self) -> None:
        pass


class Whole:
    """Emits nothing before the end."""

    def __init__(self, decode: Callable[[list[str]], str]) -> None:
        self._decode = decode
        self._tokens: list[str] = []
        self._emitted = 0

    def add(self, piece: str) -> str | list[str]:
        self._tokens.append(piece)
        return []

    def end(self) -> list[str]:
        return [self._decode(self._tokens)[self._emitted :]]

    def mark_emitted(self) -> None:
        self._emitted = len(self._decode(self._tokens))


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's alphabet (character → byte): printable bytes are spelled as themselves, the others from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


#: Character → byte, for byte-level tokens.
BYTE_LEVEL_ALPHABET = _byte_of_character()


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; UTF-8 for a token with other characters (an added token)."""
    try:
        return bytes([BYTE_LEVEL_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def fallback_byte(token: str) -> int | None:
    """Return the byte of a token such as ``<0xE2>``; None for any other token."""
    if len(token) == 6 and _FALLBACK.fullmatch(token):
        return int(token[3:5], 16)
    return None


_FALLBACK = re.compile("<0x[0-9A-Fa-f]{2}>")


class ByteLevel(_Local):
    """Each token is a string of bytes; the text is their decoding as UTF-8."""

    def __init__(self) -> None:
        # Like Rust's from_utf8_lossy: one U+FFFD for each maximal incomplete part of a character.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, piece: str) -> str | list[str]:
        return self._utf8.decode(byte_level_bytes(piece))

    def end(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]


class ByteFallback:
    """Decodes runs of ``<0x..>`` tokens as UTF-8; an invalid run becomes U+FFFD per byte."""

    def __init__(self) -> None:
        self._run = bytearray()

    def add(self, piece: str) -> str | list[str]:
        byte = fallback_byte(piece)
        if byte is not None:
            self._run.append(byte)
            return []
        return [*self.end(), piece] if self._run else piece

    def end(self) -> list[str]:
        run = bytes(self._run)
        self._run.clear()
        try:
            return [run.decode()] if run else []
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)

    def mark_emitted(self) -> None:
        # The next tokens can only change a character that the prompt left incomplete.
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        utf8.decode(self._run)
        self._run = bytearray(utf8.getstate()[0])


class Replace(_Local):
    """Replaces a string in each token."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content

    def add(self, piece: str) -> str | list[str]:
        return piece.replace(self._pattern, self._content)


class Metaspace(_Local):
    """Replaces ``▁`` by a space; in the first token, removes it if the encoder prepends it."""

    def __init__(self, replacement: str, prepended: bool) -> None:
        self._replacement = replacement
        self._first = "" if prepended else " "

    def add(self, piece: str) -> str | list[str]:
        space, self._first = self._first, " "
        return piece.replace(self._replacement, space)


class StripEach(_Local):
    """Removes the character `content` from the start of each token, at most `start` times."""

    def __init__(self, content: str, start: int) -> None:
        self._content, self._start = content, start

    def add(self, piece: str) -> str | list[str]:
        return _stripped(piece, self._content, self._start)


class StripText(_Local):
    """Removes the character `content` from the start of the text, at most `start` times."""

    def __init__(self, content: str, start: int) -> None:
        self._content, self._start = content, start

    def add(self, piece: str) -> str | list[str]:
        if self._start and piece:
            stripped = _stripped(piece, self._content, self._start)
            self._start = 0 if stripped else self._start - len(piece)
            return stripped
        return piece


def _stripped(text: str, content: str, max_times: int) -> str:
    while max_times and text.startswith(content):
        text, max_times = text[1:], max_times - 1
    return text


_CLEANUPS = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"),
    (" 'm", "'m"), (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


class WordPiece(_Local):
    """Puts a space before each token except the first. Later tokens with the prefix lose it and get no space.

    With `cleanup`, spaces before punctuation and contractions are removed.
    """

    def __init__(self, prefix: str, cleanup: bool) -> None:
        self._prefix, self._cleanup = prefix, cleanup
        self._first = True

    def add(self, piece: str) -> str | list[str]:
        if self._first:
            self._first = False
        else:
            piece = piece[len(self._prefix) :] if piece.startswith(self._prefix) else f" {piece}"
        if self._cleanup:
            for pattern, content in _CLEANUPS:
                piece = piece.replace(pattern, content)
        return piece


class WordEnd:
    """Replaces a token's suffix by a space; removes it from the last token."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._held = ""

    def add(self, piece: str) -> str | list[str]:
        emitted = self._held.replace(self._suffix, " ")
        head, suffix, tail = piece.partition(self._suffix)
        self._held = suffix + tail
        return emitted + head

    def end(self) -> list[str]:
        return [self._held.replace(self._suffix, "")]

    def mark_emitted(self) -> None:
        self._held = self._suffix if self._held else ""


class Spaced(_Local):
    """Joins tokens by spaces, for tokenizers without a decoder."""

    def __init__(self) -> None:
        self._space = ""

    def add(self, piece: str) -> str | list[str]:
        space, self._space = self._space, " "
        return space + piece
