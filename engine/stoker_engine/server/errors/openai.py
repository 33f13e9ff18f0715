"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json

from pydantic import BaseModel

from stoker_engine.server.errors.description import ErrorDescription


class ErrorInfo(BaseModel):
    """What went wrong, for a person (`message`) and for a program (the rest)."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The body of every status from 400 on, and the last event of a stream that fails."""

    error: ErrorInfo


def encode(error: ErrorDescription) -> bytes:
    """The body that reports `error`. ASCII, because a message may quote what is not valid Unicode."""
    info = ErrorInfo(message=error.message, type=error.type, param=error.param, code=error.code)
    return json.dumps(ErrorResponse(error=info).model_dump()).encode()
