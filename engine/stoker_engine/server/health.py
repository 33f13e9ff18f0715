"""What machines ask: /health, /version, /metrics."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from stoker_engine.contract.errors import EngineDeadError
from stoker_engine.server.responses import Version
from stoker_engine.server.service import Service


class UnhealthyError(EngineDeadError):
    """Whoever asks for /health takes 503 for an answer."""

    status = 503


def routes(service: Service) -> APIRouter:
    """The endpoints, for `service`."""
    router = APIRouter()
    stoker_version = Version(version=version("stoker"))

    @router.get("/health", response_class=Response)
    async def health() -> Response:
        """200 while requests make progress, 503 when they cannot."""
        if not service.client.is_healthy:
            raise UnhealthyError("the engine has stopped; see the server's log")
        return Response()

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
