"""The application: routes, error handlers and the middleware stack.

root path → metrics → request id → CORS → in flight → admin key → API key → content encoding → body limit → routes

Root path, CORS, admin key and API key are omitted if the arguments do not require them.
"""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from stoker_engine.server import health
from stoker_engine.server.anthropic import routes as messages
from stoker_engine.server.conversation.service import Service
from stoker_engine.server.errors import handlers
from stoker_engine.server.errors.anthropic import HEADER as ANTHROPIC_HEADER
from stoker_engine.server.errors.openai import ErrorResponse
from stoker_engine.server.middleware.admin_keys import AdminKeyMiddleware, admin_keys
from stoker_engine.server.middleware.api_keys import APIKeyMiddleware, APIKeys
from stoker_engine.server.middleware.body_limit import BodyLimitMiddleware
from stoker_engine.server.middleware.content_encoding import ContentEncodingMiddleware
from stoker_engine.server.middleware.http_metrics import HTTPMetricsMiddleware
from stoker_engine.server.middleware.in_flight import InFlightMiddleware
from stoker_engine.server.middleware.request_id import HEADER, RequestIdMiddleware
from stoker_engine.server.openai import chat, completions, lora_adapters, models, tokenization
from stoker_engine.server.paths import ADMIN_PATHS, OPEN_PATHS, RootPathMiddleware
from stoker_engine.server.responses import routes as responses


def create_app(service: Service) -> FastAPI:
    """Return the ASGI application of `service`.

    Raises:
        ArgumentError: a key file cannot be used; or runtime adapter loading is enabled without a flag that it requires.
    """
    args = service.args.frontend
    app = FastAPI(
        title="Stoker",
        version=version("stoker"),
        openapi_url=None if args.disable_fastapi_docs else "/openapi.json",
        docs_url=None,  # its page loads scripts from a CDN
        redoc_url=None,
        redirect_slashes=False,
        responses={"4XX": {"model": ErrorResponse}, "5XX": {"model": ErrorResponse}},
        middleware=_middleware(service),
    )
    handlers.install(app)
    for endpoints in (completions, chat, responses, messages, tokenization, models, health):
        app.include_router(endpoints.routes(service))
    if service.args.engine.enable_lora:
        app.include_router(lora_adapters.routes(service))
    return app


def _middleware(service: Service) -> list[Middleware]:
    args = service.args.frontend
    middleware = [Middleware(RootPathMiddleware, root_path=args.root_path)] if args.root_path else []
    middleware += [Middleware(HTTPMetricsMiddleware, registry=service.registry), Middleware(RequestIdMiddleware)]
    if args.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=args.allowed_origins,
                allow_methods=args.allowed_methods,
                allow_headers=args.allowed_headers,
                allow_credentials=args.allow_credentials,
                expose_headers=[HEADER, ANTHROPIC_HEADER, "retry-after"],
            )
        )
    middleware.append(
        Middleware(InFlightMiddleware, lifecycle=service.lifecycle, max_request_bytes=args.max_request_bytes)
    )
    keys, open_paths = APIKeys.from_args(args), OPEN_PATHS
    if service.args.engine.enable_lora:
        middleware.append(Middleware(AdminKeyMiddleware, keys=admin_keys(args)))
        open_paths |= ADMIN_PATHS
    if keys.are_needed:
        middleware.append(Middleware(APIKeyMiddleware, keys=keys, open_paths=open_paths))
    middleware.append(Middleware(ContentEncodingMiddleware))
    middleware.append(Middleware(BodyLimitMiddleware, limit=args.max_request_bytes))
    return middleware
