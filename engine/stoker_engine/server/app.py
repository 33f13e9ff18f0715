"""The application: routes and error handling, put together."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI

from stoker_engine.server import chat, completions, errors, health, models
from stoker_engine.server.responses import ErrorResponse
from stoker_engine.server.service import Service


def create_app(service: Service) -> FastAPI:
    """An ASGI application that serves `service`."""
    app = FastAPI(
        title="Stoker",
        version=version("stoker"),
        docs_url=None,  # its page loads scripts from elsewhere; /openapi.json is there
        redoc_url=None,
        redirect_slashes=False,
        responses={"4XX": {"model": ErrorResponse}, "5XX": {"model": ErrorResponse}},
    )
    errors.install(app)
    for endpoints in (completions, chat, models, health):
        app.include_router(endpoints.routes(service))
    return app
