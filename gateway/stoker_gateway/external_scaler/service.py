"""KEDA's gRPC service ``externalscaler.ExternalScaler``. Each gateway replica answers for all replicas.

An endpoint's load is not known while a replica's report is missing, because that replica may have any number of
requests, or if no replica serves the endpoint, because its requests do not pass through the gateway. Then GetMetrics
fails, and the endpoint is reported as active if the known requests make it so, but never as idle. So KEDA and the
HorizontalPodAutoscaler do not remove pods.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

import grpc

from stoker_common.scaling.gateway_signals import GatewaySignals
from stoker_common.scaling.signals import GatewayReport, Signals, combine
from stoker_gateway.external_scaler import messages
from stoker_gateway.external_scaler.trigger import Trigger, TriggerError, parse_trigger

#: Minimum interval of polls of the replicas, and interval of checks in a stream, in seconds.
_PERIOD_S: Final = 0.5
#: Interval in seconds at which a stream repeats that an endpoint is active while requests are held, because an earlier
#: activation may have been lost.
_REPEAT_S: Final = 5.0
#: Maximum number of concurrent calls. Each ScaledObject has a stream, and sometimes further calls.
_MAX_CALLS: Final = 10_000
#: Maximum size of a request, in bytes.
_MAX_BYTES: Final = 64 << 10


class ExternalScaler:
    """Serves KEDA's calls. Used from one event loop.

    Args:
        signals: the reports of all replicas of the gateway, including this one.
    """

    def __init__(self, signals: GatewaySignals) -> None:
        self._signals = signals
        self._reports: Mapping[str, GatewayReport | None] = {}
        self._polled_at = float("-inf")
        self._polling = asyncio.Lock()
        self._server = grpc.aio.server(
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", _MAX_BYTES)],
            maximum_concurrent_rpcs=_MAX_CALLS,
        )
        handlers = {
            "IsActive": _unary(self._is_active, messages.ScaledObjectRef),
            "GetMetricSpec": _unary(self._get_metric_spec, messages.ScaledObjectRef),
            "GetMetrics": _unary(self._get_metrics, messages.GetMetricsRequest),
            "StreamIsActive": grpc.unary_stream_rpc_method_handler(
                self._stream_is_active, messages.ScaledObjectRef.FromString, _serialize
            ),
        }
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(messages.SERVICE, handlers)])

    def listen(self, address: str) -> int:
        """Bind ``HOST:PORT``; port 0 chooses a free one. The server accepts connections after `start`.

        Returns:
            The port.

        Raises:
            OSError: the address cannot be bound.
        """
        try:
            return int(self._server.add_insecure_port(address))
        except RuntimeError as error:
            raise OSError(f"cannot listen for KEDA at {address}: {error}") from error

    async def start(self) -> None:
        """Start the server."""
        await self._server.start()

    async def stop(self) -> None:
        """End all calls, so that KEDA calls another replica."""
        await self._server.stop(0)
        await self._signals.close()

    async def _is_active(self, request: Any, context: Any) -> Any:
        trigger = await _trigger(request, context)
        signals = await self._signals_of(trigger)
        if not signals.is_busy:
            await self._abort_unknown(trigger, signals, context)
        return messages.IsActiveResponse(result=signals.is_busy)

    async def _stream_is_active(self, request: Any, context: Any) -> AsyncIterator[Any]:
        trigger = await _trigger(request, context)
        clock = asyncio.get_running_loop().time
        last, sent_at = None, 0.0
        while True:
            signals = await self._signals_of(trigger)
            active = signals.is_busy
            # A replica without a report may have requests, so the endpoint is not reported as idle.
            is_known = active or (not signals.missing and self._is_served(trigger))
            if is_known and (active != last or (signals.held and clock() - sent_at >= _REPEAT_S)):
                last, sent_at = active, clock()
                yield messages.IsActiveResponse(result=active)
            await asyncio.sleep(_PERIOD_S)

    async def _get_metric_spec(self, request: Any, context: Any) -> Any:
        trigger = await _trigger(request, context)
        spec = messages.MetricSpec(metricName=trigger.metric_name, targetSizeFloat=trigger.target)
        return messages.GetMetricSpecResponse(metricSpecs=[spec])

    async def _get_metrics(self, request: Any, context: Any) -> Any:
        trigger = await _trigger(request.scaledObjectRef, context)
        if request.metricName != trigger.metric_name:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"the trigger of {'/'.join(trigger.key)} has only the metric {trigger.metric_name!r}",
            )
        signals = await self._signals_of(trigger)
        await self._abort_unknown(trigger, signals, context)
        if trigger.metric != "pendingRequests" and signals.num_reporting() < len(signals.engines):
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, f"a pod of {'/'.join(trigger.key)} has not reported its load lately"
            )
        total = sum(signals.measure(trigger.metric))
        value = messages.MetricValue(metricName=trigger.metric_name, metricValueFloat=total)
        return messages.GetMetricsResponse(metricValues=[value])

    def _is_served(self, trigger: Trigger) -> bool:
        """Whether a replica serves the endpoint."""
        return any(report is not None and trigger.key in report.endpoints for report in self._reports.values())

    async def _abort_unknown(self, trigger: Trigger, signals: Signals, context: Any) -> None:
        """End the call with an error if the endpoint's load is not known."""
        if signals.missing:
            missing = ", ".join(signals.missing[:3])
            await context.abort(
                grpc.StatusCode.UNAVAILABLE,
                f"{len(signals.missing)} of the gateway's replicas do not report: {missing}",
            )
        if not self._is_served(trigger):
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"the gateway serves no InferenceEndpoint {'/'.join(trigger.key)}; see its condition Routed",
            )

    async def _signals_of(self, trigger: Trigger) -> Signals:
        """Return the combined reports of all replicas about an endpoint, from a poll at most `_PERIOD_S` ago."""
        clock = asyncio.get_running_loop().time
        async with self._polling:
            if clock() - self._polled_at >= _PERIOD_S:
                self._reports = await self._signals.poll()
                self._polled_at = clock()
        return combine(self._reports, trigger.key)


async def _trigger(reference: Any, context: Any) -> Trigger:
    try:
        return parse_trigger(reference.name, reference.namespace, reference.scalerMetadata)
    except TriggerError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise  # not reached


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _unary(method: Callable[[Any, Any], Awaitable[Any]], request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(method, request.FromString, _serialize)
