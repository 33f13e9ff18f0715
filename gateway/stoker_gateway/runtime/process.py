"""The picker's process: all parts of the gateway except Envoy and the supervisor.

Envoy continues if this process is killed (`supervisor`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector

from stoker_common.scaling.gateway_signals import GatewaySignals
from stoker_gateway.envoy.admin import EnvoyAdmin, LateAnswerError
from stoker_gateway.envoy.ended_log import FLUSH_S, LOGS_WRITTEN_STAT
from stoker_gateway.envoy.files import EnvoyFiles
from stoker_gateway.ext_proc.server import PickerServer
from stoker_gateway.external_scaler.service import ExternalScaler
from stoker_gateway.keys.key_file import KeyFile
from stoker_gateway.keys.keyring import Keyring
from stoker_gateway.kubernetes.cluster_watch import ClusterWatch
from stoker_gateway.limits.limiter import LocalLimiter
from stoker_gateway.limits.peers import Peers
from stoker_gateway.polling.poller import PollerThread
from stoker_gateway.registry.addresses import check_free, netloc
from stoker_gateway.registry.model_registry import ModelRegistry
from stoker_gateway.registry.named_servers import NamedServers
from stoker_gateway.runtime.listeners import answered_listener, ended_listener, in_flight_listener, settler
from stoker_gateway.runtime.live_config import LiveConfig, describe
from stoker_gateway.runtime.metrics_server import MetricsServer
from stoker_gateway.runtime.scaling_watch import ScalingWatch
from stoker_gateway.settings import GatewaySettings
from stoker_gateway.tasks import first_of
from stoker_gateway.usage.access_log_service import AccessLogService
from stoker_gateway.usage.billing import STDOUT, BillingLog
from stoker_gateway.usage.metrics import UsageMetrics

logger = logging.getLogger(__name__)

#: Maximum time at shutdown for Envoy to report completed requests, in seconds.
_REPORT_TIMEOUT_S: Final = 10.0
#: Seconds for which timeouts of Envoy's admin interface are retried at the start.
_LATE_S: Final = 60.0

#: Creates the watch of a cluster's models and keys, with its metrics in the given registry.
MakeClusterWatch = Callable[[CollectorRegistry], ClusterWatch]


async def run(
    settings: GatewaySettings,
    folder: Path,
    model_registry: ModelRegistry | None = None,
    keys: KeyFile | None = None,
    cluster: MakeClusterWatch | None = None,
    is_restart: bool = False,
    names: NamedServers | None = None,
) -> None:
    """Run the picker until SIGTERM or SIGINT, then wait for active requests; a second signal ends the wait.

    Args:
        folder: Envoy's folder.
        model_registry: models to serve; None means that they come from `cluster`.
        keys: the clients' keys; None means that they come from `cluster`, or if that is None, no key is required.
        cluster: creates the watch of the cluster; None means that no cluster is watched.
        is_restart: whether this picker replaces one that was killed.
        names: the servers' hosts, which are resolved periodically if any is a name.

    Raises:
        GatewayError: a part of the gateway cannot serve, or Envoy does not work.
        OSError: a file cannot be written, or an address cannot be bound.
    """
    await _Picker(settings, folder, model_registry, keys, cluster, is_restart, names).run()


class _Picker:
    """All parts of the picker's process."""

    def __init__(
        self,
        settings: GatewaySettings,
        folder: Path,
        model_registry: ModelRegistry | None,
        keys: KeyFile | None,
        cluster: MakeClusterWatch | None,
        is_restart: bool,
        names: NamedServers | None,
    ) -> None:
        self._settings = settings
        self._names = names
        self._is_restart = is_restart
        self._keys = keys
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()
        self._registry_known = asyncio.Event()  # set once the model registry is known
        self._reported_before = 0  # number of access log entries that Envoy wrote for earlier pickers
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._cluster = None if cluster is None else cluster(registry)
        envoy = settings.envoy(folder)
        self._envoy = EnvoyAdmin(envoy)
        self._peers = None if settings.peers is None else Peers(settings.peers)
        limiter = LocalLimiter() if self._peers is None else self._peers.limiter
        keyring = keys.keyring if keys is not None else None if cluster is None else Keyring()
        scaler = settings.external_scaler
        self._picker = PickerServer(
            ModelRegistry(),
            {},
            settings.limits,
            registry,
            keyring=keyring,
            limiter=limiter,
            reports_all=scaler is not None,
        )
        self._external_scaler = None if scaler is None else ExternalScaler(GatewaySignals(scaler.reports))
        self._picker.listen(f"unix:{envoy.picker_socket}")
        identity = f"{socket.gethostname()} {os.getpid()}"
        self._live_config = LiveConfig(EnvoyFiles(envoy), self._envoy, self._picker, identity)
        if model_registry is not None:
            self._live_config.begin(model_registry)
        self._poller = PollerThread(self._live_config.on_poll_result, self._picker.update_models)
        self._live_config.attach_poller(self._poller.poller.set_servers, self._poller.set_authorizations)
        self._usage = UsageMetrics(registry, () if keyring is None else keyring.keys)
        self._billing = None if settings.billing_log is None else BillingLog(settings.billing_log)
        listeners = [
            ended_listener(self._live_config.pickers, self._picker.wake),
            answered_listener(self._picker.answered),
            in_flight_listener(self._picker.ended),
            settler(limiter),
            self._usage.ended,
        ]
        self._ends = AccessLogService(listeners if self._billing is None else [*listeners, self._billing.ended])
        self._picker.serve_also(self._ends.register)
        self._scaling = ScalingWatch(
            self._picker, self._envoy, identity, self._registry_known.is_set, self._poller.poller.set_awaited
        )
        report = None if cluster is None else self._scaling.report
        port, envoy_metrics = settings.metrics_port, self._envoy.prometheus
        self._metrics = None if port is None else MetricsServer(registry, envoy_metrics, settings.host, port, report)

    async def run(self) -> None:
        """See `run`."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)
        async with AsyncExitStack() as ending:  # stops the parts in reverse order
            if self._billing is not None:
                ending.push_async_callback(asyncio.to_thread, self._billing.close)
            if self._peers is not None:
                ending.push_async_callback(self._peers.stop)
                await self._peers.start()
            ending.push_async_callback(self._picker.stop)
            ending.callback(self._ends.close)
            await self._picker.start(ready=self._cluster is None)
            ending.push_async_callback(self._poller.stop)
            self._poller.start()
            if self._metrics is not None:
                ending.push_async_callback(self._metrics.stop)
                check_free(self._settings.host, self._settings.metrics_port or 0)
                address = netloc(self._settings.host, await self._metrics.start())
                logger.info("metrics at http://%s/metrics", address)
            if self._external_scaler is not None and self._settings.external_scaler is not None:
                ending.push_async_callback(self._external_scaler.stop)
                self._external_scaler.listen(self._settings.external_scaler.listen)
                await self._external_scaler.start()
            await first_of(self._envoy.until_live(), self._stop_now.wait())
            if not self._stop_now.is_set():
                await self._serve()

    async def _serve(self) -> None:
        deadline = asyncio.get_running_loop().time() + _LATE_S
        if self._is_restart:
            written = await self._envoy.retry_while_late(lambda: self._envoy.statistic(LOGS_WRITTEN_STAT), deadline)
            self._reported_before = written - self._ends.received
        if self._cluster is None:
            await first_of(self._envoy.until_picker_reached(), self._stop.wait())
        port = await self._envoy.retry_while_late(self._envoy.port, deadline)
        url = f"http{'s' * (self._settings.tls is not None)}://{netloc(self._settings.host, port)}"
        # If the access log or the billing log is written to standard output, nothing else is written there.
        if not self._is_restart and not self._settings.access_log and self._settings.billing_log != STDOUT:
            print(f"stoker gateway: {url}", flush=True)  # noqa: T201
        works = [self._watch_envoy(), self._poller.watch(), self._until_drained(url), self._stop_now.wait()]
        if self._keys is not None:
            works.append(self._keys.watch(self._set_keyring))
        if self._cluster is not None:
            works += [self._cluster.watch(self._change, self._set_keyring), self._scaling.watch()]
        if self._names is not None and self._names.are_names:
            works.append(
                self._names.watch(
                    self._live_config.model_registry, self._live_config.change, self._live_config.any_lost
                )
            )
        if self._peers is not None:
            works.append(self._peers.watch())
        await first_of(*works)

    async def _until_drained(self, url: str) -> None:
        if self._cluster is not None:
            await first_of(self._registry_known.wait(), self._stop.wait())
        if not self._stop.is_set():
            self._registry_known.set()
            logger.info("%s routes requests to %s", url, describe(self._live_config.model_registry))
        await self._stop.wait()
        await self._envoy.withdraw(self._settings.drain_s)
        await asyncio.sleep(self._settings.drain_delay_s)
        await self._envoy.drain(self._settings.drain_s)
        await self._until_all_reported()

    async def _until_all_reported(self) -> None:
        """Wait until Envoy has reported all completed requests, or until a timeout. Envoy reports with a delay, and
        discards unsent reports when it exits."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _REPORT_TIMEOUT_S
        while loop.time() < deadline:
            with suppress(LateAnswerError):
                if self._ends.received >= await self._envoy.statistic(LOGS_WRITTEN_STAT) - self._reported_before:
                    return
            await asyncio.sleep(FLUSH_S)

    async def _watch_envoy(self) -> None:
        await self._registry_known.wait()  # until then the picker reports that it is not ready
        await self._envoy.watch()

    async def _change(self, model_registry: ModelRegistry) -> None:
        before = self._live_config.model_registry.endpoints.keys()
        await self._live_config.change(model_registry)
        for name in before - model_registry.endpoints.keys():
            self._usage.forget_model(name)
        if not self._registry_known.is_set():
            await self._picker.set_ready()
            self._registry_known.set()

    def _set_keyring(self, keyring: Keyring) -> None:
        self._picker.set_keyring(keyring)
        self._usage.set_keys(keyring.keys)

    def _signalled(self) -> None:
        (self._stop_now if self._stop.is_set() else self._stop).set()
