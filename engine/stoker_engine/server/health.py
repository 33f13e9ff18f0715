"""What machines ask: /health, /ready, /live, /ping, /load, /version, /metrics, /copies.

path              200 means
/live             loading or stepping progresses: leave the process alone
/health, /ping    loaded, and progressing
/ready            the same, its adapters are loaded, and the server is not about to stop: send requests

Of several engines of the model one is enough; the answer says how each of them does.
"""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel
from starlette.responses import Response

from stoker_engine.contract.engine_state import EngineState
from stoker_engine.server.conversation.service import Service
from stoker_engine.server.unavailable import UnavailableError


class ServerLoad(BaseModel):
    """The answer of /load: requests that are being generated for."""

    server_load: int


class Version(BaseModel):
    """The answer of /version."""

    version: str


def routes(service: Service) -> APIRouter:
    """The endpoints, for `service`."""
    router = APIRouter()
    client, lifecycle = service.client, service.lifecycle
    stoker_version = Version(version=version("stoker"))

    def check(is_well: bool) -> Response:
        if not is_well:
            raise UnavailableError(client.status)
        return Response(client.status, media_type="text/plain") if client.num_engines > 1 else Response()

    @router.head("/live", include_in_schema=False)
    @router.get("/live", response_class=Response)
    async def live() -> Response:
        """200 from the first moment, while loading or stepping progresses."""
        return check(client.is_live)

    @router.head("/health", include_in_schema=False)
    @router.get("/health", response_class=Response)
    async def health() -> Response:
        """200 while requests make progress, 503 when they cannot."""
        return check(client.is_ready)

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", response_class=Response)
    async def ready() -> Response:
        """200 while requests may be sent."""
        if lifecycle.leaving:
            raise UnavailableError("the server is stopping")
        if client.is_ready and not service.has_adapters:
            raise UnavailableError("loading LoRA adapters")
        return check(client.is_ready)

    @router.get("/ping", response_class=Response)
    @router.post("/ping", response_class=Response)
    async def ping() -> Response:
        """As /health; SageMaker's name for it."""
        return check(client.is_ready)

    @router.get("/copies")
    async def copies() -> list[EngineState]:
        """How each engine of the model does, which ranks it lacks, and its KV cache; always 200."""
        return client.engine_states

    @router.get("/load")
    async def load() -> ServerLoad:
        """How many requests are being generated for."""
        return ServerLoad(server_load=len(service.running))

    @router.get("/version")
    async def show_version() -> Version:
        """Stoker's version."""
        return stoker_version

    @router.get("/metrics", response_class=Response)
    def metrics() -> Response:
        """Prometheus metrics; not `async`, so that a thread writes them."""
        # Always the classic text format: in the newer ones the library writes vllm_ where vLLM says vllm:.
        return Response(generate_latest(service.registry), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    return router
