"""Why a request is not passed on, beside the errors of the contract (`contract/errors.py`).

RequestError
├── NotFoundError, OverloadedError      HTTP 404, 429: the contract's
├── UnauthorizedError   no key that holds: in `keys/errors.py`              HTTP 401
├── MethodError         this path is asked otherwise                        HTTP 405
├── TooLargeError       the body is larger than the gateway takes           HTTP 413
├── UnavailableError    no server can take it now                           HTTP 503
├── SaturatedError      all servers are busy, and it has waited             HTTP 429
└── PickerError         our mistake, or the proxy's configuration           HTTP 500
"""

from __future__ import annotations

from stoker_engine.contract.errors import RequestError


class MethodError(RequestError):
    """The path does not take the request's HTTP method."""

    status = 405


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


class SaturatedError(RetryableError):
    """All servers of the model are busy, and stayed so while the request waited."""

    status = 429
    type = "rate_limit_error"
