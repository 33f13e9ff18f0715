"""Errors for an unavailable server, missing credentials, forbidden operations and too large bodies."""

from __future__ import annotations

from stoker_common.errors import RequestError


class UnavailableError(RequestError):
    """The request cannot be served at the moment. An error response has a Retry-After header."""

    status = 503
    type = "service_unavailable_error"
    retry_after_s = 5


class NotStartedError(UnavailableError):
    """An `UnavailableError` before an engine started the request, so that a gateway may safely retry it elsewhere."""


class UnauthorizedError(RequestError):
    """The request has no valid API key."""

    status = 401
    type = "authentication_error"


class ForbiddenError(RequestError):
    """The server does not allow this operation, whatever the API key."""

    status = 403
    type = "permission_error"


class TooLargeError(RequestError):
    """The request body exceeds the server's limit."""

    status = 413
