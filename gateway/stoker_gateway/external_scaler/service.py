"""KEDA's gRPC service ``externalscaler.ExternalScaler``: each replica of the gateway answers with the sum of all.

A replica whose report is missing could have any number of requests. So no call answers as if it had none: the calls
fail, and KEDA and the HorizontalPodAutoscaler keep the number of replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, NoReturn

import grpc

from stoker_common.scaling.gateway_signals import GatewaySignals
from stoker_common.scaling.signals import GatewayReport, Signals, combine
from stoker_gateway.external_scaler import messages
from stoker_gateway.external_scaler.trigger import Trigger, TriggerError, parse_trigger

#: Seconds between two polls of the replicas while there are calls, and between two looks of a stream.
_PERIOD_S: Final = 0.5
#: Seconds after which a stream repeats that an endpoint is active while requests are held: a wake may have been lost.
_REPEAT_S: Final = 5.0
#: Calls at a time. Each ScaledObject has a stream, and further calls now and then.
_MAX_CALLS: Final = 10_000
#: Bytes of a request.
_MAX_BYTES: Final = 64 << 10


class ExternalScaler:
    """Answers KEDA. Lives in one event loop.

    Args:
        signals: the reports of all replicas of the gateway, this one's too.
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
        """Take connections at ``HOST:PORT`` once started; port 0 is any that is free.

        Returns:
            The port.

        Raises:
            OSError: the address cannot be listened at.
        """
        try:
            return int(self._server.add_insecure_port(address))
        except RuntimeError as error:
            raise OSError(f"cannot listen for KEDA at {address}: {error}") from error

    async def start(self) -> None:
        """Start to answer."""
        await self._server.start()

    async def stop(self) -> None:
        """End all calls; KEDA calls another replica then."""
        await self._server.stop(0)
        await self._signals.close()

    async def _is_active(self, request: Any, context: Any) -> Any:
        trigger = await _trigger(request, context)
        signals = await self._signals_of(trigger)
        if not signals.is_busy and signals.missing:
            await _abort_missing(signals, context)
        return messages.IsActiveResponse(result=signals.is_busy)

    async def _stream_is_active(self, request: Any, context: Any) -> AsyncIterator[Any]:
        trigger = await _trigger(request, context)
        clock = asyncio.get_running_loop().time
        last, sent_at = None, 0.0
        while True:
            signals = await self._signals_of(trigger)
            active = signals.is_busy
            # What is missing could be a request, so nothing is reported as idle meanwhile.
            is_known = active or not signals.missing
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
                f"the trigger of {'/'.join(trigger.key)} has the metric {trigger.metric_name!r}, and no other",
            )
        signals = await self._signals_of(trigger)
        if signals.missing:
            await _abort_missing(signals, context)
        if trigger.metric != "pendingRequests" and signals.num_reporting() < len(signals.engines):
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, f"a pod of {'/'.join(trigger.key)} has not reported its load lately"
            )
        total = sum(signals.measure(trigger.metric))
        value = messages.MetricValue(metricName=trigger.metric_name, metricValueFloat=total)
        return messages.GetMetricsResponse(metricValues=[value])

    async def _signals_of(self, trigger: Trigger) -> Signals:
        """What all replicas report of an endpoint, at most `_PERIOD_S` old."""
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


async def _abort_missing(signals: Signals, context: Any) -> NoReturn:
    missing = ", ".join(signals.missing[:3])
    await context.abort(
        grpc.StatusCode.UNAVAILABLE, f"{len(signals.missing)} of the gateway's replicas do not report: {missing}"
    )
    raise AssertionError("not reached")


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _unary(method: Callable[[Any, Any], Awaitable[Any]], request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(method, request.FromString, _serialize)
