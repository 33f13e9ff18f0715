"""The model's tokenizer: text → tokens, tokens → text, and chats → tokens.

We use transformers to find and build it, and the ``tokenizers`` backend directly from then on: the wrapper
changes the backend's state on every call, which fails when two threads use it at once.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from stoker_engine.contract.errors import ArgumentError, ModelError, RequestError
from stoker_engine.models.demo import cache_folder

logger = logging.getLogger(__name__)

#: Takes the special tokens as template variables, which its signature does not say.
_render: Callable[..., Any] = render_jinja_template


class Tokenizer:
    """A fast tokenizer, safe to use from several threads.

    Args:
        tokenizer: transformers' own; must have a fast backend.
        chat_template: overrides the tokenizer's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError("the model's tokenizer has no fast version (tokenizer.json); convert it with transformers")
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special = {name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
        own: str | None = tokenizer.get_chat_template() if tokenizer.chat_template else None
        self.chat_template = chat_template or own

    @classmethod
    def load(cls, path: Path, chat_template: str | None = None) -> Tokenizer:
        """Loads the tokenizer of a Hugging Face folder or a GGUF file.

        Args:
            chat_template: a Jinja template, or the path of a file that holds one.

        Raises:
            ModelError: there is none, or it cannot be read.
            ArgumentError: the chat template's file cannot be read.
        """
        template = read_chat_template(chat_template)
        try:
            folder = _converted(path) if path.is_file() else path
            return cls(AutoTokenizer.from_pretrained(folder), template)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"cannot load a tokenizer from {path}: {error}") from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`text` as token ids; with the begin-of-sequence token where the model wants one."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """`token_ids` as text, special tokens left out."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=True)
        return text

    def render_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        """A chat as token ids, up to where the assistant's answer begins. Templates run in Jinja's sandbox.

        Raises:
            RequestError: there is no chat template, or it refuses these messages.
        """
        if self.chat_template is None:
            raise RequestError(
                "this model has no chat template, so it cannot chat; start the server with "
                "--chat-template FILE, or use /v1/completions",
                "messages",
            )
        try:
            rendered, _ = _render(
                conversations=[messages],
                chat_template=self.chat_template,
                add_generation_prompt=True,
                **self._special,
                **kwargs,
            )
            text: str = rendered[0]
        except Exception as error:  # templates are the model's code: whatever they raise is about this request
            raise RequestError(f"the chat template refuses these messages: {error}", "messages") from error
        return self.encode(text, add_special_tokens=False)


def read_chat_template(argument: str | None) -> str | None:
    """The template that ``--chat-template`` means: its text, or the content of the file it names.

    Raises:
        ArgumentError: a file that cannot be read.
    """
    if argument is None or "{" in argument or "\n" in argument:
        return argument
    try:
        return Path(argument).read_text()
    except OSError as error:
        raise ArgumentError("--chat-template", f"cannot read {argument}: {error.strerror}") from error


def _converted(gguf: Path) -> Path:
    """The tokenizer inside a GGUF file, as a folder. Converting takes seconds, so it is kept."""
    stat = gguf.stat()
    key = hashlib.sha256(f"{gguf.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache_folder() / "tokenizers" / f"{gguf.stem}-{key}"
    if not (folder / "tokenizer.json").is_file():
        logger.info("converting the tokenizer of %s", gguf.name)
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was quicker
                raise
    return folder
