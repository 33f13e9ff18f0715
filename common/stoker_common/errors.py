"""The hierarchy of errors.

    StokerError
    ├── ArgumentError       a flag or field is wrong                     CLI: exit 2
    ├── ModelError          the model cannot be found, read or served    CLI: exit 2
    │   ├── ModelNotFoundError      there is no model of that name or path
    │   ├── ModelAccessDeniedError  the hub denies access
    │   ├── DownloadError           the files cannot be downloaded or stored
    │   ├── OutOfMemoryError        the model does not fit into memory
    │   └── WeightsError            the weight files are damaged, or do not fit the model
    ├── AdapterError        a LoRA adapter cannot be found, read or served       HTTP 400
    └── RequestError        a request is invalid; subclasses: see below  HTTP 400
        ├── NotFoundError   no such model, adapter, response or path     HTTP 404
        ├── RequestFailedError  the server failed at one request         HTTP 500
        ├── EngineDeadError the engine has ended                         HTTP 500, CLI: exit 1
        │   ├── EngineKilledError       killed from outside, or lost with its node
        │   ├── EngineOutOfMemoryError  memory ran out
        │   └── EngineStuckError        the engine made no progress
        ├── OverloadedError too many requests                            HTTP 429
        └── in `stoker_engine.server.unavailable`:
            ├── UnauthorizedError   no valid API key                     HTTP 401
            ├── ForbiddenError      a flag forbids the request           HTTP 403
            ├── TooLargeError       the body is too large                HTTP 413
            └── UnavailableError    the server loads, stops or is stuck  HTTP 503
                └── NotStartedError   the same, before work on the request

Each message tells the user what is wrong and, if known, what to do.
"""

from __future__ import annotations


class StokerError(Exception):
    """Base class of errors whose messages are for users."""


class ArgumentError(StokerError):
    """A command-line flag, engine argument or field is invalid.

    Args:
        argument: the argument's name as the user writes it (``--kv-cache-dtype``).
        message: what is wrong.
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
    """The hub denies access to the model."""


class DownloadError(ModelError):
    """The model's files cannot be downloaded or stored."""


class OutOfMemoryError(ModelError):
    """The weights, or the KV cache of one sequence, do not fit into memory."""


class WeightsError(ModelError):
    """The weights cannot be read, converted or used, or do not match the model's config."""


class AdapterError(StokerError):
    """A LoRA adapter cannot be found, read or served with this model."""


class RequestError(StokerError):
    """A request cannot be answered. This class itself means that the request is invalid.

    Args:
        message: what is wrong.
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
    """Something that the request names does not exist."""

    status = 404
    type = "not_found_error"


class OverloadedError(RequestError):
    """Too many requests are in flight. The response has a Retry-After header."""

    status = 429
    type = "rate_limit_error"
    retry_after_s = 1


class RequestFailedError(RequestError):
    """The server failed at a valid request. Other requests continue."""

    status = 500
    type = "internal_error"

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or "the engine failed at this request; see the server's log")


class EngineDeadError(RequestError):
    """The engine has ended, so its requests fail."""

    status = 500
    type = "internal_error"


class EngineKilledError(EngineDeadError):
    """The engine was killed from outside or lost with its node, so no request is considered the cause."""


class EngineOutOfMemoryError(EngineDeadError):
    """The engine ended because memory ran out."""


class EngineStuckError(EngineDeadError):
    """The engine made no progress."""
