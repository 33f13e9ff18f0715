"""Finds a model's tokenizer files, or converts them once and caches the result.

The engine needs a folder with a ``tokenizer.json``, which the ``tokenizers`` library loads without transformers. GGUF
files are converted by `gguf_tokenizer`, other formats (``tokenizer.model``, tiktoken, vocabulary and merges) by
transformers in a subprocess, because it imports torch, which takes seconds and memory.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from stoker_common.errors import ModelError
from stoker_engine.contract.cache_folder import cache_folder
from stoker_engine.contract.json_file import read_json_object

logger = logging.getLogger(__name__)

#: Part of the cache's key. Increment it when a conversion changes.
_FORMAT = "3"

#: Files that show that a folder contains a tokenizer.
_SOURCES = (
    "tokenizer.model",
    "tokenizer.tiktoken",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)

_CONVERT = """
import sys
from transformers import AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])
"""


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer's folder.

    Attributes:
        backend: the tokenizer in tokenizer.json if the conversion returned it, which saves seconds of loading.
    """

    folder: Path
    backend: tokenizers.Tokenizer | None = None


def find_tokenizer(path: Path) -> TokenizerFiles:
    """Return the tokenizer's files of a Hugging Face folder or a GGUF file.

    Raises:
        ModelError: there is no tokenizer, or it cannot be converted.
    """
    if path.is_file():
        from stoker_engine.tokens.gguf_tokenizer import convert_gguf

        return _converted(path, path, convert_gguf)
    if (path / "tokenizer.json").is_file():
        return TokenizerFiles(path)
    source = next((path / name for name in _SOURCES if (path / name).is_file()), None)
    if source is None:
        raise ModelError(f"{path} has no tokenizer (tokenizer.json); set --tokenizer")
    return _converted(path, source, _convert_folder)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file does not exist.

    Raises:
        ModelError: the content is not a JSON object.
    """
    try:
        return read_json_object(path)
    except FileNotFoundError:
        return {}


def _convert_folder(path: Path, target: Path) -> tokenizers.Tokenizer | None:
    result = subprocess.run(
        [sys.executable, "-c", _CONVERT, str(path), str(target)], capture_output=True, text=True, check=False
    )
    if result.returncode != 0 or not (target / "tokenizer.json").is_file():
        why = result.stderr.strip().split("\n")[-1] or "transformers has no fast version of it"
        raise ModelError(f"cannot convert the tokenizer in {path} to tokenizer.json: {why}")
    return None


def _converted(
    path: Path, source: Path, convert: Callable[[Path, Path], tokenizers.Tokenizer | None]
) -> TokenizerFiles:
    """Return the conversion of `path`, from the cache if possible. The cache's key has the path, size and
    mtime of `source`."""
    stat = source.stat()
    key = hashlib.sha256(f"{_FORMAT}:{source.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache_folder() / "tokenizers" / f"{path.stem}-{key}"
    if (folder / "tokenizer.json").is_file():
        return TokenizerFiles(folder)
    logger.info("converting the tokenizer of %s", path.name)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        backend = convert(path, partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has converted it meanwhile
                raise
    except OSError as error:
        raise ModelError(
            f"cannot store the converted tokenizer in {folder.parent} ({error}); set STOKER_CACHE"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return TokenizerFiles(folder, backend)
