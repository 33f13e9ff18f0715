"""The model's tokenizer: text → tokens, tokens → text, and chats → tokens.

The ``tokenizers`` library alone, without transformers and torch: the server's process needs neither. What transformers
would add to a tokenizer.json is read here: further special tokens and the chat template. Where a tokenizer.json and
transformers' own class for the model differ, the file holds.
"""

from __future__ import annotations

import functools
import json
import logging
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from stoker_engine.contract.errors import ArgumentError, ModelError, RequestError
from stoker_engine.tokens import chat_template as chat_templates
from stoker_engine.tokens.decoder_stages import ByteLevel, Stage, Whole, byte_level_bytes, fallback_byte, stages
from stoker_engine.tokens.tokenizer_folder import find_tokenizer, read_json

logger = logging.getLogger(__name__)

#: transformers' names of the special tokens, which are variables of chat templates too.
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A tokenizer, safe to use from several threads.

    Args:
        backend: what encodes and decodes; must not change any more.
        special_tokens: name → token: variables of the chat template.
        chat_template: the model's; None: it has none.
        chat_template_for_tools: taken instead when there are tools.
        further_special: tokens that count as special whatever the backend has them for.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        chat_template_for_tools: str | None = None,
        further_special: Iterable[str] = (),
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self._for_tools = chat_template_for_tools
        added = backend.get_added_tokens_decoder()
        self._special = {token.content for token in added.values() if token.special} | set(further_special)
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.content in self._special)
        self._decoder = _state(backend.decoder)
        chain = self.decoder_stages()
        self._byte_level = any(isinstance(stage, ByteLevel) for stage in chain)
        if any(isinstance(stage, Whole) for stage in chain):
            logger.warning("this tokenizer's decoder cannot be streamed: text comes at the end of each output")

    @classmethod
    def load(cls, path: Path, chat_template: str | None = None) -> Tokenizer:
        """Loads the tokenizer of a Hugging Face folder or a GGUF file.

        Args:
            chat_template: taken instead of the model's: a Jinja template, or the path of a file that holds one.

        Raises:
            ModelError: there is none, or it cannot be read.
            ArgumentError: the chat template's file cannot be read.
        """
        template = read_chat_template(chat_template)
        files = find_tokenizer(path)
        folder = files.folder
        config = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
        try:
            backend = files.backend or tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            named, special = _complete(backend, config)
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"cannot load the tokenizer in {folder}: {error}") from error
        own = _own_templates(folder, config)
        if template is not None:
            return cls(backend, named, template, further_special=special)
        return cls(backend, named, own.get("default"), own.get("tool_use"), special)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        size: int = self._backend.get_vocab_size()
        return size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`text` as token ids; with the begin-of-sequence token where the model wants one.

        Raises:
            RequestError: the text is no Unicode (it holds half a surrogate pair).
        """
        try:
            # As a batch of one: only then does the library let other threads run meanwhile.
            encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except UnicodeEncodeError as error:
            raise RequestError("the text holds a lone surrogate, which no encoding has", "prompt") from error
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """`token_ids` as text; ids that the tokenizer does not know have none."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """A chat as token ids; see `chat_text`."""
        return self.encode(self.chat_text(messages, **options), add_special_tokens=False)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """A chat as the text that the model reads; see `chat_template.render`.

        Args:
            chat_template: taken instead of the model's.
            chat_template_kwargs: further variables of the template.

        Raises:
            RequestError: there is no chat template, or it refuses these messages.
        """
        template = chat_template or (self._for_tools if tools and self._for_tools else self.chat_template)
        if template is None:
            raise RequestError(
                "this model has no chat template, so it cannot chat; start the server with "
                "--chat-template FILE, or use /v1/completions",
                "messages",
            )
        return chat_templates.render(
            template,
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.special_tokens, **(chat_template_kwargs or {})},
        )

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token (``Ġthe``, ``▁the``); None for an unknown id."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def ids_to_tokens(self, token_ids: Iterable[int]) -> list[str]:
        """Spellings of tokens; empty for unknown ids."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def token_to_id(self, token: str) -> int | None:
        """The id of a spelling; None: there is no such token."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; those of a special token are its spelling's."""
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._special_ids:
            return token.encode()
        if self._byte_level:
            return byte_level_bytes(token)
        byte = fallback_byte(token)
        return token.replace("▁", " ").encode() if byte is None else bytes([byte])

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - a tokenizer lives as long as its process
    def token_text(self, token_id: int) -> str:
        """What a token says by itself; U+FFFD where it is part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """See `detokenizer.Decoding`."""
        token = self.id_to_token(token_id)
        return None if skip_special_tokens and token in self._special else token

    def decoder_stages(self) -> list[Stage]:
        """See `detokenizer.Decoding`."""
        return stages(self._decoder, self._decode_tokens)

    def _decode_tokens(self, tokens: list[str]) -> str:
        text: str = self._backend.decoder.decode(tokens)
        return text


def read_chat_template(argument: str | None) -> str | None:
    """The template that ``--chat-template`` means: its text, or the content of the file it names.

    Raises:
        ArgumentError: a file that cannot be read.
    """
    if argument is None or "{" in argument or "\n" in argument:
        return argument
    try:
        return Path(argument).read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentError("--chat-template", f"cannot read {argument}: {error.strerror}") from error
    except ValueError as error:
        raise ArgumentError("--chat-template", f"{argument[:200]!r} is no text file in UTF-8: {error}") from error


def _state(decoder: Any) -> Mapping[str, Any] | None:
    """A decoder as it stands in tokenizer.json."""
    return None if decoder is None else json.loads(decoder.__getstate__())


def _complete(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Adds what transformers reads from tokenizer_config.json; returns the named special tokens, and all it lists."""
    backend.no_truncation()
    backend.no_padding()
    present = backend.get_added_tokens_decoder().values()
    listed = [
        AddedToken(**{key: value for key, value in token.items() if key != "__type"})
        for _, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    ]
    same = {repr(token) for token in present}  # which tells all of a token, as its equality does not
    missing = [token for token in listed if repr(token) not in same]
    if missing:
        backend.add_tokens(missing)
    named = {name: text for name in _NAMED if (text := _content(config.get(name))) is not None}
    extra = [config.get(name) or [] for name in ("additional_special_tokens", "extra_special_tokens")]
    texts = [*named.values(), *(_content(token) for tokens in extra if isinstance(tokens, list) for token in tokens)]
    special = [text for text in dict.fromkeys(texts) if text]  # in the order in which new ones get their ids
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return named, special


def _content(token: Any) -> str | None:
    """A token's text, given as such or as an object."""
    return token.get("content") if isinstance(token, dict) else token


def _own_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The model's chat templates by name, from wherever they may stand; most have one, ``default``."""
    templates: dict[str, str] = {}
    given = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(given, str):
        templates["default"] = given
    elif isinstance(given, list):
        for entry in given:
            if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
                raise ModelError(f"{folder}: chat_template lists {reprlib.repr(entry)}, which is no name and template")
            templates[entry["name"]] = entry["template"]
    elif given is not None:
        raise ModelError(f"{folder}: chat_template must be a string or a list, not {reprlib.repr(given)}")
    if (file := folder / "chat_template.jinja").is_file():
        templates["default"] = _text(file)
    for file in folder.glob("additional_chat_templates/*.jinja"):
        templates[file.stem] = _text(file)
    return templates


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
