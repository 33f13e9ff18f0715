"""Why a request is not passed on, beside the errors of the contract (`common/stoker_common/errors.py`).

RequestError
├── NotFoundError, OverloadedError      HTTP 404, 429: the contract's
├── UnauthorizedError   no key that holds: in `keys/errors.py`              HTTP 401
├── MethodError         this path is asked otherwise                        HTTP 405
├── MediaTypeError      the body is encoded, or no JSON, or no form         HTTP 415
├── TooLargeError       the body is larger than the gateway takes           HTTP 413
├── UnavailableError    no server can take it now                           HTTP 503
│   └── HeldError       it was held, or could not be                        HTTP 503
├── StartError          no server can be started                            HTTP 503
├── UploadError         the rest of it does not come                        HTTP 408
├── SaturatedError      all servers are busy, and it has waited             HTTP 429
├── RateLimitError      its key has no room for it                          HTTP 429
└── PickerError         our mistake, or the proxy's configuration           HTTP 500
"""

from __future__ import annotations

from typing import Final

from stoker_common.errors import RequestError
from stoker_gateway.limits.ratelimit_headers import Denial, duration


class MethodError(RequestError):
    """The path does not take the request's HTTP method."""

    status = 405


class MediaTypeError(RequestError):
    """The request's body is of a kind that is not read here."""

    status = 415


class TooLargeError(RequestError):
    """The request's body is larger than the gateway takes."""

    status = 413


class PickerError(RequestError):
    """The picker failed at this request, by no fault of the request's."""

    status = 500
    type = "internal_error"


class RetryableError(RequestError):
    """At another time this request would be fine.

    Args:
        retry_after_s: when to try again.
    """

    def __init__(self, message: str, retry_after_s: float = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(RetryableError):
    """No server of the model can take requests now."""

    status = 503
    type = "service_unavailable_error"


class HeldError(UnavailableError):
    """No server of the model was ready while the request was held, or too much was held.

    Args:
        held_s: for how many seconds it was held; None: it was not.
    """

    def __init__(self, message: str, retry_after_s: float, held_s: float | None) -> None:
        super().__init__(message, retry_after_s)
        self.held_s = held_s


class StartError(RequestError):
    """No server of the model can be started. Another try soon ends alike, so clients are asked not to make one.

    Args:
        held_s: for how many seconds the request was held; None: it was not.
    """

    status = 503
    type = "service_unavailable_error"

    def __init__(self, message: str, held_s: float | None) -> None:
        super().__init__(message, code="model_start_failed")
        self.held_s = held_s


class UploadError(RequestError):
    """The rest of a request did not come in time."""

    status = 408


class SaturatedError(RetryableError):
    """All servers of the model are busy, and stayed so while the request waited."""

    status = 429
    type = "rate_limit_error"


class RateLimitError(RequestError):
    """A request would exceed a limit of its key. In OpenAI's words, which clients know.

    Args:
        key_id: the key's.
        denial: why.
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


#: A limit → the error's type, and what is counted.
_LIMITS: Final = {
    "requests": ("requests", "requests per min (RPM)"),
    "tokens": ("tokens", "tokens per min (TPM)"),
    "concurrency": ("requests", "requests at once"),
}
