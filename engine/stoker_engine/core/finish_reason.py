"""Why a sequence ended."""

from __future__ import annotations

import enum


class FinishReason(enum.StrEnum):
    """Why a sequence ended. The values `stop` and `length` are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
