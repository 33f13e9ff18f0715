"""Store of keys in a YAML file. Creating a key appends a document, revoking it removes the document; the rest of the
file stays unchanged.

The file is replaced atomically, and writers exclude each other by a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from stoker_common.errors import ArgumentError
from stoker_gateway.keys import manifests
from stoker_gateway.keys.errors import KeyManifestError, KeyStoreError, absent, taken
from stoker_gateway.keys.key_file import documents, read_bytes
from stoker_gateway.keys.manifests import Manifest
from stoker_gateway.keys.values import moment_text


class FileStore:
    """Store of the keys in a file. Creating a key creates a missing file.

    Args:
        path: path of the file; symbolic links are followed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[Manifest]:
        """See `KeyStore`."""
        return self._documents(self._text())

    def create(self, manifest: Manifest) -> None:
        """See `KeyStore`. The manifest is written with its creation time."""
        metadata = manifest["metadata"]
        with self._locked():
            text = self._text() if self._path.exists() else ""
            before = self._documents(text)
            if metadata["name"] in map(manifests.secret_name, before):
                raise taken(metadata["name"].removeprefix(manifests.name_of("")))
            made = manifest | {"metadata": metadata | {"creationTimestamp": moment_text(datetime.now(UTC).timestamp())}}
            new = yaml.dump(made, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
            if text and not text.endswith("\n"):
                text += "\n"
            self._write(f"{text}---\n{new}" if text else new, [*before, made])

    def delete(self, key_id: str) -> None:
        """See `KeyStore`."""
        name = manifests.name_of(key_id)
        with self._locked():
            text = self._text()
            before = self._documents(text)
            kept = [each for each in before if manifests.secret_name(each) != name]
            if len(kept) == len(before):
                raise absent(key_id)
            begin, *pieces = _pieces(text)
            pieces = [piece for piece in pieces if name not in map(manifests.secret_name, self._documents(piece))]
            self._write(begin + "".join(pieces), kept)

    def _text(self) -> str:
        try:
            return read_bytes(self._path).decode()
        except UnicodeDecodeError as error:
            raise ArgumentError("--file", f"{self._path} is not UTF-8: {error.reason}") from None
        except KeyManifestError as error:
            raise ArgumentError("--file", str(error)) from None

    def _documents(self, text: str) -> list[Any]:
        try:
            return documents(text.encode(), self._path)
        except KeyManifestError as error:
            raise ArgumentError("--file", str(error)) from None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other writers. The lock is on the folder, because the file is replaced."""
        try:
            folder = os.open(self._path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ArgumentError("--file", f"the folder of {self._path} cannot be opened: {reason}") from None
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        except OSError as error:
            raise KeyStoreError(f"{self._path} cannot be written: {error.strerror}") from None
        finally:
            os.close(folder)

    def _write(self, text: str, expected: list[Any]) -> None:
        """Replace the file by `text`. Only its owner can read a new file; an existing one keeps its owner and mode.

        Raises:
            ArgumentError: `text` does not parse to the expected documents; the file is unchanged.
        """
        if self._documents(text) != expected:
            raise ArgumentError("--file", f"{self._path} cannot be changed by this command; edit it by hand")
        path = self._path.resolve()
        descriptor, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                with contextlib.suppress(FileNotFoundError):
                    before = path.stat()
                    if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                        os.fchown(descriptor, before.st_uid, before.st_gid)
                    os.fchmod(descriptor, before.st_mode & 0o777)
                file.write(text)
                file.flush()
                os.fsync(descriptor)
            Path(beside).replace(path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise


def _pieces(text: str) -> list[str]:
    """Split a text into the part before the first document, and each document with the text up to the next one."""
    events = yaml.parse(text, yaml.SafeLoader)  # not CSafeLoader: libyaml's marks do not count a byte order mark
    marks = [event.start_mark for event in events if isinstance(event, yaml.DocumentStartEvent)]
    cuts = [0, *(mark.index for mark in marks if mark is not None), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(cuts)]


class _Dumper(yaml.SafeDumper):
    """Dumper that writes multi-line strings in block style."""


def _lines(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _lines)
