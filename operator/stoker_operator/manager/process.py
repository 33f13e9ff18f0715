"""The operator's process apart from reconciling: leader election, HTTP servers, and the order of starting and stopping.

start:  answer probes and reviews ─► take part in the election ─► the work
stop:   report not ready, permit no more writes ─► the work ends ─► release the Lease ─► answer reviews for some seconds
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Mapping

from stoker_operator.admission.certificate_keeper import CertificateKeeper
from stoker_operator.admission.review import Check
from stoker_operator.admission.webhook import Learn, Webhook
from stoker_operator.cluster.kube import Kube
from stoker_operator.cluster.leadership import Leadership
from stoker_operator.process.health import Health
from stoker_operator.process.metrics import Metrics
from stoker_operator.settings import Settings


class Process:
    """Election and HTTP servers, from `start` to `stop`.

    Args:
        settings: the operator's settings, which decide which parts run.
        kube: the API server's client.
        metrics: the metrics of ``/metrics``.
        check: evaluates manifests for the webhook.
        ready: conditions of readiness, by their description in ``/readyz``.
        on_gain: called when this replica may start to write; without election, once in `start`.
        on_loss: called when this replica may no longer write, except in `stop`.
        learn: see `Webhook`.
    """

    def __init__(
        self,
        settings: Settings,
        kube: Kube,
        metrics: Metrics,
        check: Check,
        ready: Mapping[str, Callable[[], bool]],
        *,
        on_gain: Callable[[], None] = lambda: None,
        on_loss: Callable[[], None] = lambda: None,
        learn: Learn | None = None,
    ) -> None:
        self._on_gain = on_gain
        self._leaving = False
        self._leadership: Leadership | None = None
        self._keeper: CertificateKeeper | None = None
        self._webhook: Webhook | None = None
        ready = dict(ready)
        if settings.lease:
            # The host name is the pod's; the suffix distinguishes this run of the container from earlier ones.
            identity = f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"
            self._leadership = Leadership(kube, settings.lease, identity, on_gain=self._gain, on_loss=on_loss)
        if settings.webhook:
            self._keeper = CertificateKeeper(
                kube,
                settings.webhook,
                leading=self.leading,
                on_load=lambda certificate: metrics.certificate_loaded(certificate.expires),
            )
            self._webhook = Webhook(settings.webhook.address, self._keeper.tls, check, metrics, learn=learn)
            keeper = self._keeper
            ready["the webhook has a certificate"] = lambda: keeper.loaded
        self._health = Health(settings.health_address, metrics, ready)
        metrics.ask_leading(self.leading)

    def leading(self) -> bool:
        """Return whether this replica may write now. Thread-safe."""
        return self.epoch() is not None

    def epoch(self) -> int | None:
        """Return the number of this replica's term (0 without election), or None if it may not write. Thread-safe."""
        if self._leaving:
            return None
        return self._leadership.epoch if self._leadership else 0

    async def start(self) -> None:
        """Start the servers, and take part in the election.

        Raises:
            OSError: listening on an address failed.
        """
        await self._health.start()
        if self._webhook and self._keeper:
            await self._webhook.start()
            await self._keeper.start()
        if self._leadership:
            await self._leadership.start()
        else:
            self._gain()

    def _gain(self) -> None:
        if self._keeper:
            self._keeper.wake()
        self._on_gain()

    def leave(self) -> None:
        """Report not ready, so that no new clients connect, and permit no more writes. Must be called before the work
        ends."""
        self._leaving = True
        self._health.leave()

    async def stop(self, *, release: bool = True) -> None:
        """Stop the election and the servers.

        Args:
            release: whether another replica may take over at once, because all writes have ended.
        """
        if self._leadership:
            await self._leadership.stop(release=release)
        if self._webhook and self._keeper:
            await self._keeper.stop()
            await self._webhook.stop()
        await self._health.stop()
