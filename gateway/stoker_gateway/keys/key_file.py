"""A YAML file of keys: manifests of Secrets, as a cluster has them. It is read again when it changes."""

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

#: Seconds between looks.
PERIOD_S: Final = 0.5
#: Bytes of the largest file that is read: some 20,000 keys.
MAX_BYTES: Final = 16 << 20
#: Collections in collections; a Secret has three.
_DEEPEST: Final = 32


class KeyFile:
    """The keys of a file.

    Args:
        path: where it is; a link is followed, each time again.

    Raises:
        KeyManifestError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._watch = KeyWatch(str(path))
        self._complaint = ""
        self._content = read_bytes(path)
        #: The keys that it last had.
        self.keyring = self._watch.keyring(documents(self._content, path))

    async def watch(self, tell: Callable[[Keyring], None]) -> NoReturn:
        """Looks for ever, and tells the keys whenever they have changed. What cannot be read is said once, and changes
        nothing.
        """
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                content = await asyncio.to_thread(read_bytes, self._path)
                if content == self._content:
                    if self._complaint:
                        logger.info("%s can be read again", self._path)
                        self._complaint = ""
                    continue
                found = await asyncio.to_thread(documents, content, self._path)
            except KeyManifestError as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    logger.error("%s; the previous keys stay valid", error)
                continue
            self._content, self._complaint = content, ""
            self.keyring = self._watch.keyring(found)
            tell(self.keyring)


def read_bytes(path: Path) -> bytes:
    """What a file holds.

    Raises:
        KeyManifestError: it is none, too large, or cannot be read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would wait
            raise KeyManifestError(f"{path} is not a regular file; `stoker keys create --file` creates one")
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
    """The YAML documents of a file's content, without empty ones.

    Raises:
        KeyManifestError: it is not YAML.
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
    except Exception:  # a value that is not what its tag says: PyYAML raises whatever it stumbles over
        raise KeyManifestError(
            f"{path} has a value that cannot be converted to the type that it looks like; put it in quotes"
        ) from None


def _check_depth(content: bytes) -> None:
    """Loading recurses, for libyaml without a limit; its events do not."""
    depth = 0
    for event in yaml.parse(content, _BASE):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise yaml.YAMLError("it is nested too deeply")


_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_BASE):  # type: ignore[misc]
    """As the API server reads manifests: a field that is there twice is a mistake."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """A mapping."""
        keys = [self.construct_object(each, deep=True) for each, _ in node.value]
        names = [each for each in keys if isinstance(each, Hashable)]
        if len(set(names)) < len(names):
            twice = next(each for number, each in enumerate(names) if each in names[:number])
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)
