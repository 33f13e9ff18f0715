"""Errors with which the picker rejects a request, including those of `stoker_common`.

RequestError
├── NotFoundError, OverloadedError      HTTP 404, 429: in `stoker_common`
├── UnauthorizedError   no valid key, in `keys/errors.py`                   HTTP 401
├── MethodError         wrong HTTP method for this path                     HTTP 405
├── MediaTypeError      wrong Content-Type or Content-Encoding              HTTP 415
├── TooLargeError       the body exceeds a limit                            HTTP 413
├── RetryableError      the request may succeed later
│   ├── UnavailableError    the request cannot be handled now               HTTP 503
│   │   └── HeldError       held too long, or no room to hold it            HTTP 503
│   └── SaturatedError      the servers are busy                            HTTP 429
├── StartError          no server of the model can be started               HTTP 503
├── UploadError         the body did not arrive in time                     HTTP 408
├── RateLimitError      the request would exceed a limit of its key         HTTP 429
└── PickerError         internal error                                      HTTP 500
"""

from __future__ import annotations

from typing import Final

from stoker_common.errors import RequestError
from stoker_gateway.limits.ratelimit_headers import Denial, duration


class MethodError(RequestError):
    """The path does not support the request's HTTP method.

    Args:
        allowed: methods that it supports, for the header Allow.
    """

    status = 405

    def __init__(self, *allowed: str) -> None:
        self.allowed = ", ".join(allowed)
        super().__init__(f"this path does not support this HTTP method; use {' or '.join(allowed)}")


class MediaTypeError(RequestError):
    """The path does not support the body's Content-Type or Content-Encoding."""

    status = 415


class TooLargeError(RequestError):
    """The request's body exceeds one of the gateway's limits."""

    status = 413


class PickerError(RequestError):
    """The picker failed unexpectedly."""

    status = 500
    type = "internal_error"


class RetryableError(RequestError):
    """The request may succeed if it is sent again later.

    Args:
        retry_after_s: seconds after which the client should retry (``Retry-After``).
    """

    def __init__(self, message: str, retry_after_s: float = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(RetryableError):
    """The request cannot be handled now, for example because no server is ready."""

    status = 503
    type = "service_unavailable_error"


class HeldError(UnavailableError):
    """The request was held and has timed out, or exceeded a limit of held requests.

    Args:
        held_s: seconds that the request waited, if it was held; None otherwise.
    """

    def __init__(self, message: str, retry_after_s: float, held_s: float | None) -> None:
        super().__init__(message, retry_after_s)
        self.held_s = held_s


class StartError(RequestError):
    """No server of the model can be started. A retry would fail too, so a header of the response forbids retries.

    Args:
        held_s: seconds that the request waited, if it was held; None otherwise.
    """

    status = 503
    type = "service_unavailable_error"

    def __init__(self, message: str, held_s: float | None) -> None:
        super().__init__(message, code="model_start_failed")
        self.held_s = held_s


class UploadError(RequestError):
    """The request did not arrive in time."""

    status = 408


class SaturatedError(RetryableError):
    """The servers that may get the request are busy."""

    status = 429
    type = "rate_limit_error"


class RateLimitError(RequestError):
    """The request would exceed a limit of its key. The message has OpenAI's wording, which clients know.

    Args:
        denial: the limit and its usage.
    """

    status = 429

    def __init__(self, key_id: str, denial: Denial) -> None:
        kind, unit = _LIMITS[denial.what]
        retry_after_s = denial.retry_after_s
        head = "Request too large for" if retry_after_s is None else "Rate limit reached for"
        used = "" if retry_after_s is None else f" Used {denial.used},"
        message = f"{head} the key {key_id!r} on {unit}: Limit {denial.limit},{used} Requested {denial.requested}."
        if retry_after_s is not None:
            message += f" Please try again in {duration(retry_after_s)}."
        elif denial.what == "tokens":
            message += " The input or output tokens must be reduced in order to run successfully."
        else:
            message += " This key allows no requests; ask the gateway's administrator for another key."
        super().__init__(message, code="rate_limit_exceeded")
        self.type = kind
        self.denial = denial


#: Limit → type of the error, and unit of the limit.
_LIMITS: Final = {
    "requests": ("requests", "requests per min (RPM)"),
    "tokens": ("tokens", "tokens per min (TPM)"),
    "concurrency": ("requests", "requests at once"),
}
