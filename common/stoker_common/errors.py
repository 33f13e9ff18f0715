"""The hierarchy of errors.

    StokerError
    ├── ArgumentError       a flag or field is wrong                     CLI: exit 2
    ├── ModelError          the model cannot be found, read or served    CLI: exit 2
    │   ├── ModelNotFoundError      there is no model of that name or path
    │   ├── ModelAccessDeniedError  the hub denies access
    │   ├── DownloadError           the hub cannot be reached, or the disk is full
    │   ├── OutOfMemoryError        the model does not fit into memory
    │   └── WeightsError            missing, unused or misshapen tensors
    ├── AdapterError        a LoRA adapter cannot be found, read or served       HTTP 400
    └── RequestError        one request is wrong; others are unaffected  HTTP 400
        ├── NotFoundError   no such model                                HTTP 404
        ├── RequestFailedError  the engine failed at one request         HTTP 500
        ├── EngineDeadError the engine stopped; nothing can be served    HTTP 500, CLI: exit 1
        │   ├── EngineKilledError       killed by a signal from outside
        │   ├── EngineOutOfMemoryError  memory ran out
        │   └── EngineStuckError        the engine made no progress
        ├── OverloadedError a queue is full                              HTTP 429
        └── in `stoker_engine.server.unavailable`, for requests that may succeed later, with another key, or if smaller:
            ├── UnauthorizedError   no valid API key                     HTTP 401
            ├── ForbiddenError      a flag forbids the request           HTTP 403
            ├── TooLargeError       the body is too large                HTTP 413
            └── UnavailableError    the server loads, stops or is stuck  HTTP 503
                └── NotStartedError   the same, before work on the request

Each message tells the user what is wrong and what to do.
"""

from __future__ import annotations


class StokerError(Exception):
    """Base class of all errors that Stoker raises on purpose."""


class ArgumentError(StokerError):
    """A command-line flag or engine argument is invalid.

    Args:
        argument: the argument's name as typed by the user (``--kv-cache-dtype``).
        message: what is wrong and what to do instead.
    """

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(f"{argument}: {message}")
        self.argument = argument
        self.message = message


class ModelError(StokerError):
    """The model cannot be found, read or served by this engine."""


class ModelNotFoundError(ModelError):
    """There is no model of that name, revision or path."""


class ModelAccessDeniedError(ModelError):
    """The hub denies access to the model with this token."""


class DownloadError(ModelError):
    """The model's files cannot be downloaded now; a retry may succeed."""


class OutOfMemoryError(ModelError):
    """The weights, or the KV cache of one sequence, do not fit into memory."""


class WeightsError(ModelError):
    """The weight files do not match the model description."""


class AdapterError(StokerError):
    """A LoRA adapter cannot be found, read or served with this model. The model and other adapters remain available."""


class RequestError(StokerError):
    """A request is invalid. It is answered with HTTP 400; other requests are unaffected.

    Args:
        message: what is wrong and what to do.
        param: the invalid field of the request, as in OpenAI's errors.
        code: a machine-readable code, as in OpenAI's errors.
    """

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class NotFoundError(RequestError):
    """The requested model is not available on this server."""

    status = 404
    type = "not_found_error"


class OverloadedError(RequestError):
    """A queue is full. The response has a Retry-After header."""

    status = 429
    type = "rate_limit_error"
    retry_after_s = 1


class RequestFailedError(RequestError):
    """The engine failed at a valid request. Other requests continue."""

    status = 500
    type = "internal_error"

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or "the engine failed at this request; see the server's log")


class EngineDeadError(RequestError):
    """The engine has stopped. In-flight and new requests fail with this error."""

    status = 500
    type = "internal_error"


class EngineKilledError(EngineDeadError):
    """A signal from outside killed the engine, so none of its requests is the cause."""


class EngineOutOfMemoryError(EngineDeadError):
    """The engine stopped because memory ran out."""


class EngineStuckError(EngineDeadError):
    """The engine made no progress, and was killed for that."""
