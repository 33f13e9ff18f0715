"""Cause of the end of ``stoker serve``, written as the pod's termination message.

Reading a pod's logs requires a permission of its own; the termination message is part of the pod's status, which
everyone who may read the pod can see. People read it in ``kubectl describe pod``; programs parse its form:

    REASON: message
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from stoker_common.errors import (
    ArgumentError,
    DownloadError,
    EngineDeadError,
    EngineOutOfMemoryError,
    ModelAccessDeniedError,
    ModelError,
    ModelNotFoundError,
    OutOfMemoryError,
    StokerError,
)

#: Limit of the kubelet in bytes; of a longer message it keeps only the end.
MAX_BYTES: Final = 4096


class Reason(enum.StrEnum):
    """Why ``stoker serve`` ended, in Kubernetes' CamelCase."""

    MODEL_NOT_FOUND = "ModelNotFound"
    MODEL_ACCESS_DENIED = "ModelAccessDenied"
    DOWNLOAD_FAILED = "DownloadFailed"
    #: The model was found, but cannot be read or served.
    MODEL_UNSUPPORTED = "ModelUnsupported"
    #: The model does not fit into the memory according to `sizing`, or memory ran out.
    OUT_OF_MEMORY = "OutOfMemory"
    #: An argument, a file that the server needs, or the server's address cannot be used.
    START_ERROR = "StartError"
    #: The engine ended because of an internal error, or was killed.
    ENGINE_DIED = "EngineDied"


#: Reason by error type; the first matching type wins.
_REASONS: Final[tuple[tuple[type[Exception], Reason], ...]] = (
    (ModelNotFoundError, Reason.MODEL_NOT_FOUND),
    (ModelAccessDeniedError, Reason.MODEL_ACCESS_DENIED),
    (DownloadError, Reason.DOWNLOAD_FAILED),
    (OutOfMemoryError, Reason.OUT_OF_MEMORY),
    (EngineOutOfMemoryError, Reason.OUT_OF_MEMORY),
    (ModelError, Reason.MODEL_UNSUPPORTED),
    (ArgumentError, Reason.START_ERROR),
    (EngineDeadError, Reason.ENGINE_DIED),
)


@dataclass(frozen=True)
class TerminationMessage:
    """Why ``stoker serve`` ended.

    Attributes:
        reason: for programs.
        message: for people: the cause and the remedy.
    """

    reason: Reason
    message: str

    @classmethod
    def of(cls, error: Exception, otherwise: Reason = Reason.ENGINE_DIED) -> TerminationMessage:
        """Return the reason and message of an error; `otherwise`: reason of errors that are not in `_REASONS`."""
        reason = next((reason for kind, reason in _REASONS if isinstance(error, kind)), otherwise)
        return cls(reason, str(error) if isinstance(error, StokerError) else f"{type(error).__name__}: {error}")

    @classmethod
    def parse(cls, text: str) -> TerminationMessage | None:
        """Parse a message that `__str__` returned; None for other text."""
        reason, separator, message = text.strip().partition(": ")
        if not separator or reason not in list(Reason):
            return None
        return cls(Reason(reason), message)

    def __str__(self) -> str:
        """Return the termination message, at most `MAX_BYTES` of UTF-8."""
        encoded = f"{self.reason}: {self.message}".encode(errors="replace")  # paths may have surrogates
        return encoded[:MAX_BYTES].decode(errors="ignore")
