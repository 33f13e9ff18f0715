"""Why a request is turned away that would be fine at another time or elsewhere. Answers say when to try again."""

from __future__ import annotations

from stoker_common.errors import RequestError


class UnavailableError(RequestError):
    """The server loads, stops, or cannot work at the moment."""

    status = 503
    type = "service_unavailable_error"
    retry_after_s = 5


class NotStartedError(UnavailableError):
    """The same, and nothing of the request was started: whatever it asks for, another server may be asked for it."""


class UnauthorizedError(RequestError):
    """No valid API key came with the request."""

    status = 401
    type = "authentication_error"


class ForbiddenError(RequestError):
    """The server does not do this, whatever key comes with the request."""

    status = 403
    type = "permission_error"


class TooLargeError(RequestError):
    """The request's body is larger than the server takes."""

    status = 413
