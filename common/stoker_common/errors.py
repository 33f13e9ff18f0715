"""The one error tree.

    StokerError
    ├── ArgumentError       a flag or field is wrong                     CLI: exit 2
    ├── ModelError          the model cannot be found, read or served    CLI: exit 2
    │   ├── ModelNotFoundError      there is none of that name or path
    │   ├── ModelAccessDeniedError  the hub does not give it to us
    │   ├── DownloadError           the hub cannot be reached, or the disk is full
    │   ├── OutOfMemoryError        it does not fit
    │   └── WeightsError            missing, unused or misshapen tensors
    ├── AdapterError        a LoRA adapter cannot be found, read or served       HTTP 400
    └── RequestError        one request is wrong; only it is answered so HTTP 400
        ├── NotFoundError   no such model                                HTTP 404
        ├── RequestFailedError  this request broke in the engine; others go on   HTTP 500
        ├── EngineDeadError the engine stopped; nothing can be served    HTTP 500, CLI: exit 1
        │   ├── EngineKilledError       a signal from outside ended it
        │   ├── EngineOutOfMemoryError  because memory ran out
        │   └── EngineStuckError        it made no progress
        ├── OverloadedError a queue is full                              HTTP 429
        └── in `server.unavailable`, what is fine at another time, with another key, or in another size:
            ├── UnauthorizedError   no valid API key                     HTTP 401
            ├── ForbiddenError      a flag does not allow it             HTTP 403
            ├── TooLargeError       the body is too large                HTTP 413
            └── UnavailableError    the server loads, stops or is stuck  HTTP 503
                └── NotStartedError   the same, before anything was started

Each carries a sentence a user can act on: what is wrong, and the remedy.
"""

from __future__ import annotations


class StokerError(Exception):
    """Root of everything we raise on purpose."""


class ArgumentError(StokerError):
    """A command-line flag or engine argument is invalid.

    Args:
        argument: the argument's name as the user typed it (``--kv-cache-dtype``).
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
    """The hub has the model and does not give access with this token."""


class DownloadError(ModelError):
    """The model's files cannot be fetched now; trying again may help."""


class OutOfMemoryError(ModelError):
    """The model, or one sequence of it, does not fit into memory."""


class WeightsError(ModelError):
    """The weight files do not match the model description."""


class AdapterError(StokerError):
    """A LoRA adapter cannot be found, read or served with this model; the model and other adapters are served on."""


class RequestError(StokerError):
    """One request is invalid; it is answered with HTTP 400 and touches no other.

    Args:
        message: what is wrong and the remedy.
        param: the offending request field, in OpenAI's error shape.
    """

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class NotFoundError(RequestError):
    """The requested model is not served here."""

    status = 404
    type = "not_found_error"


class OverloadedError(RequestError):
    """A queue's limit is reached. Answers say when to try again."""

    status = 429
    type = "rate_limit_error"
    retry_after_s = 1


class RequestFailedError(RequestError):
    """The engine failed at this one request, by no fault of the request's; others go on."""

    status = 500
    type = "internal_error"

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or "the engine failed at this request; see the server's log")


class EngineDeadError(RequestError):
    """The engine's loop has stopped; in-flight and new requests end with this."""

    status = 500
    type = "internal_error"


class EngineKilledError(EngineDeadError):
    """A signal from outside ended the engine: no request that it worked on can have done so."""


class EngineOutOfMemoryError(EngineDeadError):
    """The engine stopped because memory ran out."""


class EngineStuckError(EngineDeadError):
    """The engine made no progress, and was killed for that."""
