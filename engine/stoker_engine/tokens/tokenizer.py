"""The model's tokenizer: text → tokens, tokens → text, and chats → tokens.

The tokenizer uses only the ``tokenizers`` library, so that its process needs neither transformers nor torch. The
additions that transformers makes to a tokenizer.json are read here: additional special tokens and the chat template. If
a tokenizer.json differs from transformers' class for the model, the file takes precedence.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import json
import logging
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from stoker_common.errors import ArgumentError, ModelError, RequestError
from stoker_engine.contract.names import ContentFormat
from stoker_engine.tokens import chat_template as chat_templates
from stoker_engine.tokens.content_format import ContentForms
from stoker_engine.tokens.longest_token import longest_token
from stoker_engine.tokens.piece_decoders import Whole
from stoker_engine.tokens.tokenizer_folder import find_tokenizer, read_json
from stoker_engine.tokens.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

#: transformers' names of the special tokens, which are also variables of chat templates.
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer(Vocabulary):
    """A thread-safe tokenizer: a vocabulary that also encodes texts and renders chats.

    Args:
        backend: the tokenizer of the ``tokenizers`` library; must not be modified afterwards.
        special_tokens: name → token; variables of the chat template.
        chat_template: the model's chat template; None: the model has none.
        chat_template_for_tools: replaces `chat_template` if there are tools.
        further_special: tokens to treat as special even if the backend does not.
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
        self._for_tools = chat_template_for_tools
        added = backend.get_added_tokens_decoder()
        special = frozenset(token.content for token in added.values() if token.special) | frozenset(further_special)
        spellings = {token_id: token for token, token_id in backend.get_vocab().items()}
        spellings |= {token_id: token.content for token_id, token in added.items()}
        longest, ignores_whitespace = longest_token(backend)
        super().__init__(
            tokens=[spellings.get(token_id) for token_id in range(max(spellings, default=-1) + 1)],
            special=special,
            special_ids=frozenset(token_id for token_id, token in added.items() if token.content in special),
            decoder=_state(backend.decoder),
            backend_decoder=backend.decoder,
            longest_token=longest,
            ignores_whitespace=ignores_whitespace,
            chat_template=chat_template,
        )
        if any(isinstance(decoder, Whole) for decoder in self.piece_decoders()):
            logger.warning("this tokenizer's decoder cannot be streamed; the text of each output is sent at its end")
        self._forms_of = functools.lru_cache(maxsize=32)(self._content_forms)  # requests may contain templates
        for template in filter(None, (chat_template, chat_template_for_tools)):
            if chat_templates.compile_ahead(template) and not self._forms_of(template).writes_users:
                logger.warning("the chat template ignores or rejects user messages; set another one by --chat-template")

    @property
    def vocabulary(self) -> Vocabulary:
        """The picklable part of the tokenizer, for another process."""
        known = {each.name: getattr(self, each.name) for each in dataclasses.fields(Vocabulary)}
        return Vocabulary(**{**known, "chat_template": self._for_tools or self.chat_template})

    @classmethod
    def load(cls, path: Path, chat_template: str | None = None) -> Tokenizer:
        """Load the tokenizer of a Hugging Face folder or a GGUF file.

        Args:
            chat_template: replaces the model's: a Jinja template, or the path of a file with one.

        Raises:
            ModelError: there is no tokenizer, or it cannot be read.
            ArgumentError: the chat template's file cannot be read.
        """
        template = read_chat_template(chat_template)
        files = find_tokenizer(path)
        folder = files.folder
        config = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
        try:
            backend = files.backend or _backend(folder / "tokenizer.json")
            named, special = _complete(backend, config)
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"cannot load the tokenizer in {folder}: {error}") from error
        templates = _own_templates(folder, config)
        if template is not None:
            return cls(backend, named, template, further_special=special)
        return cls(backend, named, templates.get("default"), templates.get("tool_use"), special)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones."""
        size: int = self._backend.get_vocab_size()
        return size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, by default with the special tokens that the tokenizer adds to a prompt.

        Raises:
            RequestError: the text is not valid Unicode (it contains a lone surrogate).
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of several texts; see `encode`. Releases the GIL."""
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise RequestError("the text contains a lone surrogate, which is invalid Unicode", "prompt") from error
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; unknown ids have no text."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Return the token ids of a chat; see `chat_text`."""
        return self.encode(self.chat_text(messages, **options), add_special_tokens=False)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return the text of a chat, as the model reads it; see `chat_template.render`.

        Args:
            messages: their content is a string or a list of parts, converted to the form that the template accepts.
            chat_template: replaces the model's chat template.
            chat_template_kwargs: further variables of the template.
            chat_template_content_format: the form of all content: strings or parts; ``auto``: as the template accepts.

        Raises:
            RequestError: there is no chat template, or it rejects these messages.
        """
        template = chat_template or (self._for_tools if tools and self._for_tools else self.chat_template)
        if template is None:
            raise RequestError(
                "this model has no chat template, so it cannot chat; start the server with --chat-template FILE, set "
                "spec.model.chatTemplate in its manifest, or use /v1/completions",
                "messages",
            )
        return chat_templates.render(
            template,
            self._forms_of(template).adapt(messages, chat_template_content_format),
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.special_tokens, **(chat_template_kwargs or {})},
        )

    def _content_forms(self, template: str) -> ContentForms:
        return ContentForms(
            lambda messages, tools: chat_templates.render(
                template, messages, tools=tools, variables=self.special_tokens
            )
        )

    def token_to_id(self, token: str) -> int | None:
        """Return the id of the token with this text; None if there is none."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id


def read_chat_template(argument: str | None) -> str | None:
    """Return the template given by ``--chat-template``: its text, or the content of the file that it names.

    Raises:
        ArgumentError: the file cannot be read.
    """
    if argument is None or "{" in argument or "\n" in argument:
        return argument
    try:
        return Path(argument).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ArgumentError("--chat-template", f"cannot read {argument}: {error.strerror}") from error
    except ValueError as error:
        raise ArgumentError("--chat-template", f"{argument[:200]!r} is not a UTF-8 text file: {error}") from error


def _backend(file: Path) -> tokenizers.Tokenizer:
    """Load a tokenizer.json, without a byte-order mark, which the library rejects."""
    with file.open("rb") as opened:
        if opened.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
            return tokenizers.Tokenizer.from_buffer(opened.read())
    return tokenizers.Tokenizer.from_file(str(file))


def _state(decoder: Any) -> Mapping[str, Any] | None:
    """Return a decoder as in tokenizer.json."""
    return None if decoder is None else json.loads(decoder.__getstate__())


def _complete(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Add the special and added tokens of `config`, as transformers does. Return the named special tokens of `config`
    (name → token), and all of its special tokens."""
    backend.no_truncation()
    backend.no_padding()
    present = backend.get_added_tokens_decoder().values()
    listed = [
        AddedToken(**{key: value for key, value in token.items() if key != "__type"})
        for _, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    ]
    same = {repr(token) for token in present}  # repr contains all fields of a token; == ignores some
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
    """Return the text of a token that is given as a string or an object."""
    return token.get("content") if isinstance(token, dict) else token


def _own_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the model's chat templates by name, from all files that may contain them."""
    templates: dict[str, str] = {}
    configured = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(configured, str):
        templates["default"] = configured
    elif isinstance(configured, list):
        for entry in configured:
            if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
                raise ModelError(
                    f"{folder}: chat_template has the entry {reprlib.repr(entry)}, which lacks a name or template"
                )
            templates[entry["name"]] = entry["template"]
    elif configured is not None:
        raise ModelError(f"{folder}: chat_template must be a string or a list, not {reprlib.repr(configured)}")
    if (file := folder / "chat_template.jinja").is_file():
        templates["default"] = _text(file)
    for file in folder.glob("additional_chat_templates/*.jinja"):
        templates[file.stem] = _text(file)
    return templates


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
