"""The cause of an engine's end, for the pod's termination message.

A pod's logs need a right of their own; its termination message is part of its status, which everyone who may
see the pod can read. One line for people (``kubectl describe pod``) that a program can parse:

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

#: What the kubelet keeps of a termination message, which it cuts at the front.
MAX_BYTES: Final = 4096


class Reason(enum.StrEnum):
    """Why an engine ended; Kubernetes' CamelCase words."""

    MODEL_NOT_FOUND = "ModelNotFound"
    MODEL_ACCESS_DENIED = "ModelAccessDenied"
    DOWNLOAD_FAILED = "DownloadFailed"
    #: The model is here and cannot be read or served.
    MODEL_UNSUPPORTED = "ModelUnsupported"
    #: The model does not fit, by the contract's sums; or memory ran out.
    OUT_OF_MEMORY = "OutOfMemory"
    #: An argument, a file of the server's, or its address is wrong.
    START_ERROR = "StartError"
    #: It ended by an error of its own, or was killed.
    ENGINE_DIED = "EngineDied"


#: The first that an error is an instance of.
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
    """Why an engine ended.

    Attributes:
        reason: for programs.
        message: for people: what was wrong, and the remedy.
    """

    reason: Reason
    message: str

    @classmethod
    def of(cls, error: Exception, otherwise: Reason = Reason.ENGINE_DIED) -> TerminationMessage:
        """The reason and message of an error; `otherwise` is the reason where its kind has none."""
        reason = next((reason for kind, reason in _REASONS if isinstance(error, kind)), otherwise)
        return cls(reason, str(error) if isinstance(error, StokerError) else f"{type(error).__name__}: {error}")

    @classmethod
    def parse(cls, text: str) -> TerminationMessage | None:
        """Reads what `str` wrote; None where others did."""
        reason, separator, message = text.strip().partition(": ")
        if not separator or reason not in list(Reason):
            return None
        return cls(Reason(reason), message)

    def __str__(self) -> str:
        """The termination message, at most `MAX_BYTES` of UTF-8."""
        return f"{self.reason}: {self.message}".encode()[:MAX_BYTES].decode(errors="ignore")
