"""Endpoints for probes and monitoring: /health, /ready, /live, /ping, /load, /version, /metrics, /copies.

path              200 means
/live             an engine's process runs and is not stuck: the server needs no restart
/health, /ping    all engines have been loaded, one serves, and all front ends have started
/ready            as /health, configured adapters are loaded or have failed, and the server is not stopping

With several engines, the response describes each engine. All front ends of a server give the same answers.
"""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel
from starlette.responses import Response

from stoker_engine.contract.engine_state import EngineState
from stoker_engine.server.conversation.service import Service
from stoker_engine.server.unavailable import UnavailableError


class ServerLoad(BaseModel):
    """Response of /load: number of admitted requests that have not ended."""

    server_load: int


class Version(BaseModel):
    """Response of /version."""

    version: str


def routes(service: Service) -> APIRouter:
    """Return the endpoints of `service`."""
    router = APIRouter()
    client, lifecycle = service.client, service.lifecycle
    stoker_version = Version(version=version("stoker"))

    def check(is_well: bool) -> Response:
        if not is_well:
            raise UnavailableError(service.status)
        return Response(client.status, media_type="text/plain") if client.num_engines > 1 else Response()

    @router.head("/live", include_in_schema=False)
    @router.get("/live", response_class=Response)
    async def live() -> Response:
        """200 while an engine is loading or serving, and is not stuck."""
        return check(client.is_live)

    @router.head("/health", include_in_schema=False)
    @router.get("/health", response_class=Response)
    async def health() -> Response:
        """200 while an engine serves, else 503."""
        return check(service.is_ready)

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", response_class=Response)
    async def ready() -> Response:
        """200 while the server should receive requests."""
        if lifecycle.leaving:
            raise UnavailableError("the server is stopping")
        if service.is_ready and not service.has_adapters:
            raise UnavailableError("loading LoRA adapters")
        return check(service.is_ready)

    @router.get("/ping", response_class=Response)
    @router.post("/ping", response_class=Response)
    async def ping() -> Response:
        """Alias of /health, required by SageMaker."""
        return check(service.is_ready)

    @router.get("/copies")
    async def copies() -> list[EngineState]:
        """State of each engine, its missing ranks and its KV cache; always 200."""
        return await service.engine_states()

    @router.get("/load")
    async def load() -> ServerLoad:
        """Number of admitted requests that have not ended."""
        return ServerLoad(server_load=service.num_running)

    @router.get("/version")
    async def show_version() -> Version:
        """Stoker's version."""
        return stoker_version

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics of the whole server."""
        return Response(await service.metrics(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    return router
