"""Access to `ADMIN_PATHS`: only if runtime loading is enabled, and with a key of ``--admin-api-key-file``.

Keys are checked before the body is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from stoker_common.errors import RequestError
from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.server.errors import handlers
from stoker_engine.server.middleware.api_keys import APIKeys, credentials
from stoker_engine.server.paths import ADMIN_PATHS, route_path
from stoker_engine.server.unavailable import ForbiddenError

_VARIABLE: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"


def admin_keys(args: FrontendArgs, environment: Mapping[str, str] = os.environ) -> APIKeys | None:
    """Return the keys that open `ADMIN_PATHS`; None if these paths are disabled.

    Raises:
        ArgumentError: the environment enables runtime loading without a flag that it requires; or the file cannot be
            used; see `APIKeys`.
    """
    allowed = args.allow_runtime_lora_updating
    if not allowed and environment.get(_VARIABLE, "").strip().lower() in ("1", "true"):
        args.check_runtime_lora_updating(f"environment variable {_VARIABLE}")
        allowed = True
    if args.admin_api_key_file is None:
        return None
    keys = APIKeys(
        (),
        Path(args.admin_api_key_file),
        flag="--admin-api-key-file",
        refusal="loading and unloading adapters requires a key of --admin-api-key-file: Authorization: Bearer KEY",
    )
    return keys if allowed else None


class AdminKeyMiddleware:
    """Refuses requests for `ADMIN_PATHS` without a valid key.

    Args:
        keys: valid keys; None refuses all requests for these paths.
    """

    def __init__(self, app: ASGIApp, keys: APIKeys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] == "http" and route_path(scope) in ADMIN_PATHS:
            try:
                if self._keys is None:
                    raise ForbiddenError(
                        "runtime loading of adapters is disabled; start the server with --allow-runtime-lora-updating"
                    )
                self._keys.check(*credentials(scope))
            except RequestError as error:
                await handlers.response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)
