"""The operator's process, beside its work: who leads, what is answered over HTTP, and in which order all of it ends.

start:  answer probes and reviews ─► take part in the election ─► the work
stop:   not ready any more ─► the work ends ─► give up the Lease ─► answer reviews until the API server sends no more
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
    """All of it, from `start` to `stop`.

    Args:
        settings: which parts there are.
        kube: the cluster.
        metrics: what ``/metrics`` shows.
        check: the webhook's judge.
        ready: what has to be so for the process to be ready, by what it is called in ``/readyz``.
        on_gain: called when this replica begins to write; once, at `start`, where there is no election.
        on_loss: called when it no longer may.
        learn: as the webhook's.
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
        self._leadership: Leadership | None = None
        self._keeper: CertificateKeeper | None = None
        self._webhook: Webhook | None = None
        ready = dict(ready)
        if settings.lease:
            # A container is called as its pod; the rest distinguishes its life from the one before.
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
        """Whether this replica may write now. May be called from any thread."""
        return self.epoch() is not None

    def epoch(self) -> int | None:
        """The number of the lead in which this replica may write; None where it may not. May be called from any
        thread."""
        return self._leadership.epoch if self._leadership else 0

    async def start(self) -> None:
        """Begins to answer, and to take part in the election.

        Raises:
            OSError: an address cannot be listened on.
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
        """Reports not ready, so that no new client comes. To be called before the work ends."""
        self._health.leave()

    async def stop(self) -> None:
        """Ends; the work must have ended before, since others may begin it now."""
        if self._leadership:
            await self._leadership.stop()
        if self._webhook and self._keeper:
            await self._keeper.stop()
            await self._webhook.stop()
        await self._health.stop()
