"""API keys: compared in constant time and never logged.

Every path requires a key, except `OPEN_PATHS` and CORS preflights; `ADMIN_PATHS` require an admin key instead. Keys
come from ``--api-key`` and ``--api-key-file``, or, if neither is given, from the environment variables STOKER_API_KEY
and VLLM_API_KEY. If none is set, the server is open.

``--api-key-file`` is a file, or a folder of such files: a mounted Secret has a file for each of its keys. A mounted
Secret changes in place, so each request checks the file and rereads it if it has changed. If it cannot be reread, the
previous keys stay valid; if it holds no key, only keys of ``--api-key`` are valid.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from stoker_common.errors import ArgumentError
from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.server.errors import handlers
from stoker_engine.server.paths import OPEN_PATHS, route_path
from stoker_engine.server.unavailable import UnauthorizedError

logger = logging.getLogger(__name__)

_ENVIRONMENT = ("STOKER_API_KEY", "VLLM_API_KEY")


class APIKeys:
    """The keys that are currently valid.

    Args:
        keys: keys given on the command line or by the environment.
        file: file with more keys, one a line; or a folder of such files, which may hold no key at first.
        flag: the flag that names the file, for errors.
        refusal: the message for requests without a valid key.

    Raises:
        ArgumentError: `file` cannot be read, or is not a folder and holds no key.
    """

    def __init__(
        self,
        keys: Iterable[str],
        file: Path | None = None,
        *,
        flag: str = "--api-key-file",
        refusal: str = "a valid API key is required: Authorization: Bearer KEY",
    ) -> None:
        self._refusal = refusal
        self._fixed = _digests(keys)
        self._file = file
        self._from_file: list[bytes] = []
        self._stamp: list[tuple[str, int, int, int]] | None = None
        self._complained = False
        if file is not None:
            try:
                self._read(file)
            except (OSError, UnicodeDecodeError) as error:
                raise ArgumentError(flag, f"cannot read {file}: {error}") from error
            if not self._from_file and not file.is_dir():
                raise ArgumentError(flag, f"{file} holds no key; write one a line")

    @classmethod
    def from_args(cls, args: FrontendArgs, environment: Mapping[str, str] = os.environ) -> APIKeys:
        """Return the keys of the flags, or without such flags those of the environment.

        Raises:
            ArgumentError: the file cannot be used; see `APIKeys`.
        """
        if args.api_key or args.api_key_file is not None:
            return cls(args.api_key, None if args.api_key_file is None else Path(args.api_key_file))
        return cls(filter(None, map(environment.get, _ENVIRONMENT)))

    @property
    def are_needed(self) -> bool:
        """Whether requests need a key."""
        return bool(self._fixed) or self._file is not None

    def check(self, authorization: bytes | None, x_api_key: bytes | None = None) -> bytes:
        """Check an ``Authorization`` header, or Anthropic's ``x-api-key``; one valid header is enough.

        Returns:
            SHA-256 digest of the valid key, which identifies the client.

        Raises:
            UnauthorizedError: neither header holds a valid key.
        """
        scheme, _, bearer = (authorization or b"").partition(b" ")
        presented = [bearer if scheme.lower() == b"bearer" else b"", x_api_key or b""]
        self._refresh()
        # Every key is compared, and digests have equal lengths, so timing does not reveal keys.
        digests = [hashlib.sha256(key.strip()).digest() for key in presented]
        known = (*self._fixed, *self._from_file)
        valid = [each for digest in digests for each in known if hmac.compare_digest(digest, each)]
        if not valid:
            raise UnauthorizedError(self._refusal, code="invalid_api_key")
        return valid[0]

    def _refresh(self) -> None:
        if self._file is None:
            return
        try:
            self._read(self._file)
            self._complained = False
        except (OSError, UnicodeDecodeError) as error:
            if not self._complained:
                self._complained = True
                logger.warning("cannot reread the API keys; the previous keys stay valid: %s", error)

    def _read(self, file: Path) -> None:
        stats = [(each, each.stat()) for each in _files(file)]
        stamp = [(each.name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for each, stat in stats]
        if stamp == self._stamp:
            return
        lines = [line.strip() for each, _ in stats for line in each.read_text().split("\n")]
        self._from_file = _digests(lines)
        self._stamp = stamp
        if self._from_file:
            logger.info("%s holds %d API keys", file, len(self._from_file))
        elif self._fixed:
            logger.warning("%s holds no API key; only the keys of --api-key are valid", file)
        else:
            logger.warning("%s holds no API key; requests that need one are refused", file)


class APIKeyMiddleware:
    """Refuses requests without a valid key, and stores the digest of the key in the request's state as `api_key`.

    Args:
        open_paths: paths that need no key of `keys`.
    """

    def __init__(self, app: ASGIApp, keys: APIKeys, open_paths: AbstractSet[str] = OPEN_PATHS) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] == "http" and route_path(scope) not in self._open_paths:
            try:
                scope.setdefault("state", {})["api_key"] = self._keys.check(*credentials(scope))
            except UnauthorizedError as error:
                await handlers.response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def credentials(scope: Scope) -> tuple[bytes | None, bytes | None]:
    """Return the ``Authorization`` and ``x-api-key`` headers of a request, for `APIKeys.check`."""
    headers = Headers(scope=scope)
    authorization, x_api_key = headers.get("authorization"), headers.get("x-api-key")
    return (
        None if authorization is None else authorization.encode("latin-1"),
        None if x_api_key is None else x_api_key.encode("latin-1"),
    )


def _files(path: Path) -> list[Path]:
    """Return the file, or a folder's files except hidden ones: mounted Secrets keep versions in hidden folders."""
    if not path.is_dir():
        return [path]
    return sorted(each for each in path.iterdir() if not each.name.startswith(".") and each.is_file())


def _digests(keys: Iterable[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys if key]
