"""Base class of the errors of the gateway's parts."""

from __future__ import annotations

from stoker_common.errors import StokerError


class GatewayError(StokerError):
    """A part of the gateway cannot be started, fails, or has exited."""
