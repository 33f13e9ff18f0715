"""A YAML file of keys, in the form of manifests of Secrets. It is reloaded when it changes."""

from __future__ import annotations

import asyncio
import logging
import stat
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml

from stoker_gateway.keys.errors import KeyManifestError
from stoker_gateway.keys.key_watch import KeyWatch
from stoker_gateway.keys.keyring import Keyring

logger = logging.getLogger(__name__)

#: Interval of checks for changes, in seconds.
PERIOD_S: Final = 0.5
#: Maximum size of the file in bytes; enough for about 20,000 keys.
MAX_BYTES: Final = 16 << 20
#: Maximum nesting depth of collections; a Secret needs three.
_DEEPEST: Final = 32


class KeyFile:
    """The keys of a file.

    Args:
        path: path of the file; symbolic links are followed at each read.

    Raises:
        KeyManifestError: the file cannot be read or is not YAML.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._watch = KeyWatch(str(path))
        self._logged_error = ""
        self._content = read_bytes(path)
        #: The keys at the last successful read.
        self.keyring = self._watch.keyring(documents(self._content, path))

    async def watch(self, on_change: Callable[[Keyring], None]) -> NoReturn:
        """Check the file forever, and call `on_change` with the keys whenever the file has changed. If the file cannot
        be read, log the error once and keep the previous keys.
        """
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                content = await asyncio.to_thread(read_bytes, self._path)
                if content == self._content:
                    if self._logged_error:
                        logger.info("%s can be read again", self._path)
                        self._logged_error = ""
                    continue
                found = await asyncio.to_thread(documents, content, self._path)
            except KeyManifestError as error:
                if str(error) != self._logged_error:
                    self._logged_error = str(error)
                    logger.error("%s; the previous keys stay valid", error)
                continue
            self._content, self._logged_error = content, ""
            self.keyring = self._watch.keyring(found)
            on_change(self.keyring)


def read_bytes(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        KeyManifestError: the file is not a regular file, too large, or not readable.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would block
            raise KeyManifestError(f"{path} is not a regular file; use another path")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise KeyManifestError(f"{path} does not exist; `stoker keys create --file` creates it") from None
    except (OSError, ValueError) as error:  # a path may have a null byte
        raise KeyManifestError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > MAX_BYTES:
        raise KeyManifestError(f"{path} is larger than {MAX_BYTES >> 20} MiB, the maximum")
    return content


def documents(content: bytes, path: Path) -> list[Any]:
    """Return the YAML documents of a file's content, without empty ones.

    Raises:
        KeyManifestError: the content is not valid YAML.
    """
    try:
        _check_depth(content)
        return [each for each in yaml.load_all(content, _Loader) if each is not None]
    except yaml.MarkedYAMLError as error:
        position = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise KeyManifestError(f"{path} is not YAML{position}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        first, *_ = str(error).split("\n")
        raise KeyManifestError(f"{path} is not YAML: {first}") from None
    except Exception:  # PyYAML raises any error for a value that does not match its tag
        raise KeyManifestError(
            f"{path} has a value that cannot be converted to the type that it looks like; put it in quotes"
        ) from None


def _check_depth(content: bytes) -> None:
    """Check the nesting depth by parser events, because the loader recurses, and libyaml has no limit."""
    depth = 0
    for event in yaml.parse(content, _BASE):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise yaml.YAMLError("collections are nested too deeply")


_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_BASE):  # type: ignore[misc]
    """Loader that rejects duplicate keys, as the API server does."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Construct a mapping."""
        keys = [self.construct_object(each, deep=True) for each, _ in node.value]
        names = [each for each in keys if isinstance(each, Hashable)]
        if len(set(names)) < len(names):
            twice = next(each for number, each in enumerate(names) if each in names[:number])
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)
