"""Metrics and log lines about the engines, from the reports of their steps."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry

from stoker_engine.contract.serve_args import ServeArgs
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.step_report import StepReport
from stoker_engine.metrics import EngineMetrics
from stoker_engine.server.engine.engine_client import EngineClient
from stoker_engine.server.observability.request_log import RequestLog
from stoker_engine.server.observability.throughput_log import ThroughputLog

logger = logging.getLogger(__name__)


class EngineRecords:
    """Records of all engines of `client`. Used from the event loop only.

    Args:
        registry: gets the metrics once the engines are loaded.
    """

    def __init__(
        self, args: ServeArgs, client: EngineClient, registry: CollectorRegistry, requests: RequestLog
    ) -> None:
        self._args, self._client, self._registry, self._requests = args, client, registry, requests
        self._metrics: EngineMetrics | None = None
        self._throughput = None if args.frontend.disable_log_stats else ThroughputLog()
        client.on_step = self._on_step

    def on_loaded(self, info: EngineInfo) -> None:
        """Create the metrics and log facts about the model, once the engines are loaded."""
        client, name = self._client, self._args.model_names[0]
        infos = [client.info_of(engine) for engine in range(client.num_engines)]
        self._metrics = EngineMetrics(self._registry, name, self._args.engine, infos)
        for engine in range(client.num_engines):
            self._metrics.look_up(engine, functools.partial(client.serves, engine))
        if info.licence is not None:
            logger.info("licence of %s: %s", name, info.licence)
        if info.model_card is not None:
            logger.info("model card of %s: %s", name, info.model_card)

    def look_up_adapters(self, counts: Mapping[str, Callable[[], int]]) -> None:
        """See `EngineMetrics.look_up_adapters`."""
        assert self._metrics is not None
        self._metrics.look_up_adapters(counts)

    def on_death(self, engine: int) -> None:
        """Record the death of an engine."""
        assert self._metrics is not None
        self._metrics.on_death(engine)
        if self._throughput is not None:
            self._throughput.on_death(engine)

    def on_restart(self, engine: int) -> None:
        """Record the start of a restart."""
        assert self._metrics is not None
        self._metrics.on_restart(engine)

    def on_loaded_again(self, engine: int) -> None:
        """Record that a restarted engine is loaded."""
        assert self._metrics is not None
        self._metrics.on_loaded_again(self._client.info_of(engine), engine)

    def on_rejected(self, limit: str) -> None:
        """Record a request that was rejected by a queue limit."""
        if self._metrics is not None:
            self._metrics.on_rejected(limit)

    def _on_step(self, report: StepReport) -> None:
        if self._metrics is not None:
            self._metrics.on_step(report)
        if self._throughput is not None:
            self._throughput.on_step(report)
        self._requests.on_step(report)
