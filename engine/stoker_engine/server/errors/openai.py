"""Errors in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json

from pydantic import BaseModel

from stoker_engine.server.errors.description import ErrorDescription


class ErrorInfo(BaseModel):
    """An error: `message` for people, the other fields for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """Body of every response with a status from 400 on, and the last event of a failed stream."""

    error: ErrorInfo


def encode(error: ErrorDescription) -> bytes:
    """Return the body that reports `error`. ASCII only, because a message may quote text that is not valid Unicode."""
    info = ErrorInfo(message=error.message, type=error.type, param=error.param, code=error.code)
    return json.dumps(ErrorResponse(error=info).model_dump()).encode()
