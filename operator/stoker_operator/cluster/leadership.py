"""Leader election among the operator's replicas: the leader holds a Lease, and only the leader writes.

The Lease (``coordination.k8s.io``) names its holder, which renews it every few seconds. Other candidates poll it: if it
is unchanged for its whole duration, its holder counts as gone, and a candidate may take it. The `resourceVersion` makes
the write fail for all candidates but one. This is the algorithm of client-go, with the same fields of the Lease.

    holder:   ├─renew─┼─renew─┼─✗           it considers itself leader until ─┐ `renew_deadline`
    others:           │ saw it change ───── duration ─────► take it           ▼
                      └───────────────────────────────┴──── the old holder starts no more writes

Clocks of different machines are never compared. Each candidate measures with its own monotonic clock how long it has
seen the Lease unchanged. A holder that cannot renew stops writing after `renew_deadline`, which is shorter than the
duration. No event is needed for this: `leading` depends on the time, and is checked before each write.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum

from stoker_operator.cluster.kube import Kube, KubeError, Object
from stoker_operator.process.background_loop import OwnThread
from stoker_operator.settings import LeaseSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timing:
    """Times in seconds, named as in client-go.

    Attributes:
        lease_duration: a Lease that is unchanged for this time may be taken.
        renew_deadline: a leader that fails to renew for this time stops leading.
        retry_period: average pause between attempts to renew or take the Lease, without Retry-After.
    """

    lease_duration: float = 10
    renew_deadline: float = 7
    retry_period: float = 2


class Step(Enum):
    """The next step of a candidate."""

    CREATE = "there is no Lease"
    RENEW = "this replica holds the Lease"
    TAKE = "the Lease has no holder, or its holder is gone"
    WAIT = "another replica holds the Lease"


def decide(lease: Object | None, identity: str, unchanged: float) -> Step:
    """Return the next step of the candidate `identity`, which has seen the Lease unchanged for `unchanged` seconds."""
    if lease is None:
        return Step.CREATE
    spec = lease.get("spec") or {}
    holder = spec.get("holderIdentity")
    if holder == identity:
        return Step.RENEW
    # The Lease's own duration is used, because the holder may be another release with another duration.
    if not holder or unchanged >= (spec.get("leaseDurationSeconds") or 0):
        return Step.TAKE
    return Step.WAIT


class Leadership:
    """Takes part in the election from `start` to `stop`.

    Args:
        kube: the API server's client.
        lease: namespace and name of the Lease.
        identity: unique name of this replica.
        on_gain: called when this replica starts to lead. It must return at once, because the Lease must be renewed.
        on_loss: called after this replica has stopped leading, except by `stop`. It must return at once.
        timing: duration and deadlines of the election.
        clock: monotonic clock, in seconds.
        jitter: returns a random number from 0 to 1, which spreads the requests of replicas that started together.
    """

    def __init__(
        self,
        kube: Kube,
        lease: LeaseSettings,
        identity: str,
        *,
        on_gain: Callable[[], None],
        on_loss: Callable[[], None],
        timing: Timing = Timing(),
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._kube = kube
        self._namespace, self._name, self._identity = lease.namespace, lease.name, identity
        self._on_gain, self._on_loss = on_gain, on_loss
        self._timing, self._clock, self._jitter = timing, clock, jitter
        self._lease: Object | None = None  # last observed state
        self._changed = 0.0  # time at which that state was first observed
        self._renewed: float | None = None  # when the last successful renewal was sent; None once a loss is noticed
        self._epoch = 0
        self._task: asyncio.Task[None] | None = None
        self._thread = OwnThread("lease")

    @property
    def leading(self) -> bool:
        """Whether this replica may write now. Thread-safe."""
        renewed = self._renewed
        return renewed is not None and self._clock() < renewed + self._timing.renew_deadline

    @property
    def epoch(self) -> int | None:
        """Number of this replica's current term as the leader, or None if it does not lead. Thread-safe."""
        # `leading` is read before the number, so that a term that has ended is not returned as the current one.
        leading = self.leading
        return self._epoch if leading else None

    async def start(self) -> None:
        """Start to take part."""
        self._task = asyncio.create_task(self._run(), name="leadership")

    async def stop(self, *, release: bool = True) -> None:
        """Stop taking part. A leader releases the Lease, so that its successor need not wait for it to expire.

        Args:
            release: whether to release it. It must be False while the operator still writes.
        """
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        led, self._renewed = self.leading, None
        if led and release:
            try:
                async with asyncio.timeout(self._timing.retry_period):
                    await self._release()
            except (KubeError, TimeoutError) as error:
                logger.warning("could not release the Lease %s/%s: %s", self._namespace, self._name, error)
        self._thread.close()

    async def _run(self) -> None:
        while True:
            retry_after = 0.0
            try:
                async with asyncio.timeout(self._patience()):
                    await self._round()
            except KubeError as error:
                retry_after = error.retry_after
                logger.warning("Lease %s/%s: %s", self._namespace, self._name, error)
            except TimeoutError:
                logger.warning("Lease %s/%s: no answer from the API server yet", self._namespace, self._name)
            except Exception:
                logger.exception("Lease %s/%s: this is a bug in the operator", self._namespace, self._name)
            if not self.leading:
                self._lose("the replica did not renew the Lease in time")
            pause = self._timing.retry_period * (0.8 + 0.4 * self._jitter())
            await asyncio.sleep(min(max(pause, retry_after), self._patience()))

    def _patience(self) -> float:
        """Return the maximum time to wait, in seconds: a leader must notice in time that it no longer leads."""
        if self._renewed is None:
            return self._timing.renew_deadline
        return max(0.0, self._renewed + self._timing.renew_deadline - self._clock())

    async def _round(self) -> None:
        if self._renewed is not None:
            # No other replica should have written the Lease, so it need not be read first.
            try:
                await self._hold(self._replace)
                return
            except KubeError as error:
                if error.status not in (404, 409):
                    raise
        lease = await self._thread.call(lambda: self._kube.get("Lease", self._namespace, self._name))
        if _version(lease) != _version(self._lease) or lease is None:
            self._lease, self._changed = lease, self._clock()
        step = decide(lease, self._identity, self._clock() - self._changed)
        if step in (Step.WAIT, Step.TAKE):
            self._lose("another replica took the Lease")
        try:
            if step is Step.CREATE:
                await self._hold(self._create)
            elif step is not Step.WAIT:
                await self._hold(self._replace)
        except KubeError as error:
            if error.status != 409:
                raise
            self._lose("another replica wrote the Lease first")

    async def _hold(self, write: Callable[[], Awaitable[None]]) -> None:
        began = self._clock()  # the earliest time at which another replica can see the renewal
        await write()
        if not self.leading:
            self._lose("the replica did not renew the Lease in time")
        gained = self._renewed is None
        if gained:
            self._epoch += 1
        self._renewed = began
        if gained:
            logger.info("%s leads with the Lease %s/%s", self._identity, self._namespace, self._name)
            self._on_gain()

    def _lose(self, reason: str) -> None:
        """Stop leading, if this replica leads."""
        if self._renewed is None:
            return
        self._renewed = None
        logger.warning("%s no longer leads: %s", self._identity, reason)
        self._on_loss()

    async def _create(self) -> None:
        metadata = {"name": self._name, "namespace": self._namespace}
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": self._spec({})}
        self._lease, self._changed = await self._thread.call(lambda: self._kube.create(body)), self._clock()

    async def _replace(self) -> None:
        assert self._lease is not None
        body = {**self._lease, "spec": self._spec(self._lease.get("spec") or {})}
        self._lease, self._changed = await self._thread.call(lambda: self._kube.replace(body)), self._clock()

    async def _release(self) -> None:
        # Read first: a write that `stop` did not wait for may have succeeded.
        lease = await self._thread.call(lambda: self._kube.get("Lease", self._namespace, self._name))
        if lease and lease["spec"].get("holderIdentity") == self._identity:
            no_holder = {"holderIdentity": "", "leaseDurationSeconds": 1}
            body = {**lease, "spec": {**lease["spec"], **no_holder}}
            await self._thread.call(lambda: self._kube.replace(body))
            logger.info("released the Lease %s/%s", self._namespace, self._name)

    def _spec(self, last: Object) -> Object:
        """Return the Lease's spec with this replica as its holder."""
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
        is_renewal = last.get("holderIdentity") == self._identity
        transitions = last.get("leaseTransitions") or 0
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": round(self._timing.lease_duration),
            "acquireTime": last.get("acquireTime", now) if is_renewal else now,
            "renewTime": now,
            "leaseTransitions": transitions if is_renewal or not last else transitions + 1,
        }


def _version(lease: Object | None) -> str:
    return str(lease["metadata"]["resourceVersion"]) if lease else ""
