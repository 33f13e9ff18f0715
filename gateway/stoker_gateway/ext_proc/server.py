"""The endpoint picker's gRPC server: Envoy's external processing, and gRPC's health checks.

A stream carries one HTTP request and ends when the picker has handled it, so responses of servers do not depend on the
picker.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from prometheus_client import CollectorRegistry

from stoker_common import logs
from stoker_common.errors import NotFoundError, OverloadedError, RequestError
from stoker_gateway.ext_proc.answers import error_reply
from stoker_gateway.ext_proc.errors import (
    PickerError,
    RateLimitError,
    SaturatedError,
    StartError,
    TooLargeError,
    UnavailableError,
    UploadError,
)
from stoker_gateway.ext_proc.exchange import Exchange, Progress, ProtocolError, Route
from stoker_gateway.ext_proc.metrics import PickerMetrics
from stoker_gateway.ext_proc.request_handler import RequestHandler, RequestHead
from stoker_gateway.ext_proc.request_limits import RequestLimits
from stoker_gateway.keys.errors import UnauthorizedError
from stoker_gateway.keys.keyring import Keyring
from stoker_gateway.limits.limiter import Limiter
from stoker_gateway.registry.model_registry import ModelRegistry
from stoker_gateway.scheduling.picker import EndpointPicker

logger = logging.getLogger(__name__)

#: Service names of gRPC health checks: whether the process is alive, and whether proxies should use this picker.
LIVENESS: Final = "liveness"
READINESS: Final = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")

#: Maximum size of a message without its body (headers, metadata), in bytes.
_MESSAGE_OVERHEAD: Final = 2**20


@dataclass(frozen=True)
class TLSFiles:
    """Paths of a certificate and its key, in PEM. The server reloads them when they change."""

    certificate: Path
    key: Path


class PickerServer:
    """gRPC server that chooses servers for a proxy's requests. Runs in one event loop.

    Args:
        pickers: picker of each endpoint, by served name.
        registry: Prometheus registry for the metrics.
        clock: monotonic clock, in seconds.
        keyring: valid keys; None means that requests need no key and may use all models.
        limiter: enforces the keys' limits; the default is a `LocalLimiter`.
        reports_all: whether `scaling_report` also contains endpoints without scaling.
    """

    def __init__(
        self,
        model_registry: ModelRegistry,
        pickers: Mapping[str, EndpointPicker],
        limits: RequestLimits | None = None,
        registry: CollectorRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
        keyring: Keyring | None = None,
        limiter: Limiter | None = None,
        reports_all: bool = False,
    ) -> None:
        self._limits = limits or RequestLimits()
        self._metrics = PickerMetrics(registry or CollectorRegistry())
        self._handler = RequestHandler(
            model_registry,
            pickers,
            self._limits,
            self._metrics,
            clock,
            keyring,
            limiter=limiter,
            reports_all=reports_all,
        )
        self._health = health.HealthServicer()
        limit = self._limits.max_body_bytes + _MESSAGE_OVERHEAD
        options = [
            ("grpc.max_receive_message_length", limit),
            ("grpc.so_reuseport", 0),
            # Proxies are on the same machine or network, and probing the bandwidth costs 1/12 of each decision's time.
            ("grpc.http2.bdp_probe", 0),
        ]
        self._server = grpc.aio.server(options=options)
        self._processor = Processor(self._handler, self._limits, self._metrics)
        external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(self._processor, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def serve_also(self, register: Callable[[Any], None]) -> None:
        """Register another gRPC service on the server. Must be called before `start`."""
        register(self._server)

    def listen(self, address: str, tls: TLSFiles | None = None) -> int:
        """Bind an address. The server accepts connections after `start`.

        Args:
            address: ``unix:PATH`` or ``HOST:PORT``; port 0 chooses a free one.
            tls: the server's certificate; None means that connections are not encrypted.

        Returns:
            The port; meaningless for a Unix socket.

        Raises:
            OSError: the address cannot be bound.
        """
        try:
            if tls is None:
                return int(self._server.add_insecure_port(address))
            return int(self._server.add_secure_port(address, _credentials(tls)))
        except RuntimeError as error:
            raise OSError(f"cannot listen at {address}: {error}") from error

    async def start(self, *, ready: bool = True) -> None:
        """Start the server.

        Args:
            ready: whether the model registry is complete. If not, requests are rejected with a retryable error until
                `set_ready` is called.
        """
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        self._processor.ready = ready
        await self._set_ready(ready)
        await self._server.start()

    async def set_ready(self) -> None:
        """Accept requests, and report that the picker is ready. Called when the model registry is complete."""
        self._processor.ready = True
        await self._set_ready(True)

    async def drain(self) -> None:
        """Report that the picker is not ready, so that proxies use another picker. The server still answers
        requests."""
        await self._set_ready(False)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Stop the server. Open streams may take `grace_s` seconds to finish."""
        await self.drain()
        await self._server.stop(grace_s)
        await self._handler.close()

    def update(self, model_registry: ModelRegistry, pickers: Mapping[str, EndpointPicker]) -> None:
        """Replace the model registry and the pickers."""
        self._handler.update(model_registry, pickers)

    def set_keyring(self, keyring: Keyring | None) -> None:
        """Replace the valid keys; None means that requests need no key and may use all models."""
        self._handler.set_keyring(keyring)

    def answered(self, model: str, pick: int, server: str) -> None:
        """Record which server answered a request; later requests for the stored response go there.

        Args:
            model: served name.
            pick: number of the pick that routed the request.
            server: ``IP:PORT`` of the server that answered.
        """
        self._handler.answered(model, pick, server)

    def update_models(self, server: str, answer: bytes, authorization: str = "") -> None:
        """Record the body of a server's response to ``GET /v1/models``, from which the gateway answers its own
        ``/v1/models``, and the ``Authorization`` that the server accepted (empty if there was none)."""
        self._handler.update_models(server, answer, authorization)

    def ended(self, model: str, pick: int) -> None:
        """Record that a request has ended.

        Args:
            model: served name.
            pick: number of the pick that routed the request.
        """
        self._handler.ended(model, pick)

    def awaited(self) -> set[str]:
        """Return the servers for which requests of endpoints with scaling wait."""
        return self._handler.awaited()

    def scaling_report(self) -> list[dict[str, Any]]:
        """Return the report for autoscalers: one entry for each reported endpoint."""
        return self._handler.scaling_report()

    @property
    def is_draining(self) -> bool:
        """Whether any endpoint with a current drain id may have active requests."""
        return self._handler.is_draining

    @property
    def needs_counts(self) -> bool:
        """Whether Envoy's counts of active requests are needed."""
        return self._handler.needs_counts

    def counted(self, active: Mapping[str, int], requested_at: float) -> None:
        """Record Envoy's counts of active requests by cluster, which were requested at `requested_at`."""
        self._handler.counted(active, requested_at)

    def wake(self, model: str) -> None:
        """Retry a model's queued requests, because its servers may have room now."""
        self._handler.wake(model)

    async def _set_ready(self, ready: bool) -> None:
        states = health_pb2.HealthCheckResponse
        for name in READINESS:
            await self._health.set(name, states.SERVING if ready else states.NOT_SERVING)


class Processor(external_processor_pb2_grpc.ExternalProcessorServicer):  # type: ignore[misc]
    """Envoy's external-processing service."""

    def __init__(self, handler: RequestHandler, limits: RequestLimits, metrics: PickerMetrics) -> None:
        self._handler = handler
        self._limits = limits
        self._metrics = metrics
        self.ready = True

    async def Process(self, _messages: Any, context: Any) -> None:  # noqa: N802, gRPC's name
        """Route, answer or reject one HTTP request."""
        exchange = Exchange(self._limits.max_body_bytes)
        outcome = _Outcome()
        try:
            await self._decide(exchange, context, outcome)
        except ProtocolError as error:
            outcome.name = "failed"
            logger.error("the proxy violates the endpoint-picker protocol: %s", error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except RequestError as error:
            outcome.name = _outcome_name(error)
            await context.write(exchange.reply(error_reply(error, outcome.path, outcome.request_id)))
        except Exception:
            outcome.name = "failed"
            logger.exception("routing a request failed")
            failure = PickerError("internal error; see the gateway's log")
            await context.write(exchange.reply(error_reply(failure, outcome.path, outcome.request_id)))
        finally:
            self._metrics.requests.labels(outcome.model, outcome.name).inc()

    async def _decide(self, exchange: Exchange, context: Any, outcome: _Outcome) -> None:
        request_head: RequestHead | None = None
        while (message := await self._read(context, request_head)) is not grpc.aio.EOF:
            progress = exchange.receive(message)
            if progress is Progress.MORE:
                continue
            if request_head is None:
                request_head = RequestHead.of(exchange)
                outcome.path, outcome.request_id = request_head.path, request_head.request_id
                logs.request_id.set(request_head.request_id)  # each stream has its own task, hence its own context
                if not self.ready:
                    raise UnavailableError("the gateway has not loaded its list of models yet; try again")
                if (reply := self._handler.at_once(request_head)) is not None:
                    outcome.name = "answered"
                    await context.write(exchange.reply(reply))
                    return
            if progress is Progress.TOO_LARGE:
                raise self._handler.too_large()
            if progress is Progress.HEADERS:
                if (response := exchange.go_on()) is not None:
                    await context.write(response)
                continue
            del message  # it contains a second copy of the body, and the request may wait for a long time
            route = await self._handler.decide(
                request_head,
                exchange.body,
                lambda seconds: context.write(exchange.extend(seconds)),
                outcome.set_model,
            )
            outcome.name = "routed"
            responses = exchange.route(route)
            await self._send_route(route, responses, context)
            for response in responses:
                await context.write(response)
            return

    async def _read(self, context: Any, request_head: RequestHead | None) -> Any:
        """Return the next message. Messages after the request's head have a time limit, `RequestLimits.upload_s`."""
        limit_s = self._limits.upload_s
        if request_head is None or math.isinf(limit_s):
            return await context.read()
        try:
            return await asyncio.wait_for(context.read(), limit_s)
        except TimeoutError:
            raise UploadError(f"the request took more than {limit_s:g} s to arrive") from None

    async def _send_route(self, route: Route, responses: Iterator[Any], context: Any) -> None:
        """Send the first response, which contains the route; if that fails, release the request's reservation.

        A proxy closes the stream, which cancels this coroutine, when its client disconnects, and also as soon as the
        proxy has read the route. If sending succeeds after the cancellation, it is unknown whether the proxy has read
        the route.
        """

        async def write() -> None:
            await context.write(next(responses))

        def end(task: asyncio.Task[None]) -> None:
            if task.cancelled() or task.exception() is not None:
                self._handler.undo(route)
            elif cancelled:
                self._handler.count_as_used(route)

        cancelled = False
        writing = asyncio.create_task(write())
        writing.add_done_callback(end)
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            cancelled = True
            raise


@dataclass(slots=True)
class _Outcome:
    """Data of a request for error responses and the metrics. `name` is the value of the label ``outcome``."""

    path: str = ""
    request_id: str | None = None
    model: str = ""
    name: str = "cancelled"

    def set_model(self, model: str) -> None:
        """Set the request's model."""
        self.model = model


def _outcome_name(error: RequestError) -> str:
    match error:
        case UnauthorizedError():
            return "unauthorized"
        case NotFoundError():
            return "not_found"
        case TooLargeError():
            return "too_large"
        case UnavailableError() | StartError():
            return "unavailable"
        case SaturatedError() | OverloadedError():
            return "saturated"
        case RateLimitError():
            return "limited"
        case PickerError():
            return "failed"
    return "invalid"


def _credentials(tls: TLSFiles) -> Any:
    stamp: tuple[int, int] | None = None

    def read() -> Any:
        """Return the certificate if its files have changed, else None."""
        nonlocal stamp
        now = tls.certificate.stat().st_mtime_ns, tls.key.stat().st_mtime_ns
        if now == stamp:
            return None
        pair = tls.key.read_bytes(), tls.certificate.read_bytes()
        stamp = now
        return grpc.ssl_server_certificate_configuration([pair])

    first = read()
    return grpc.dynamic_ssl_server_credentials(first, read, require_client_authentication=False)
