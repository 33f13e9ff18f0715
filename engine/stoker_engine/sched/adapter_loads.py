"""Runs the loads and drops of LoRA adapters that `adapters.AdapterTable` decides, concurrently with the steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Final

from stoker_common.errors import AdapterError, EngineDeadError
from stoker_engine.core.adapter import AdapterSource, LoadedAdapter
from stoker_engine.sched.adapters import AdapterTable

logger = logging.getLogger(__name__)

#: Maximum seconds to wait for a load when nothing else can run; requests and aborts may arrive meanwhile.
_WAIT_S: Final = 0.01

#: Error of a registration whose adapter was removed before its load started.
_REMOVED: Final = "LoRA adapter {name} was removed before it was loaded"


class AdapterLoads:
    """The registrations and loads of adapters in flight.

    Args:
        load: starts to load an adapter on all ranks. Its future raises `AdapterError` if that fails.
        drop: frees an adapter's memory after the steps already launched have run.
    """

    def __init__(
        self,
        table: AdapterTable,
        load: Callable[[AdapterSource], Future[LoadedAdapter]],
        drop: Callable[[int], None],
    ) -> None:
        self._table, self._load, self._drop = table, load, drop
        self._in_flight: dict[int, Future[LoadedAdapter]] = {}
        self._registering: dict[int, tuple[AdapterSource, Future[LoadedAdapter]]] = {}

    @property
    def has_work(self) -> bool:
        """Whether a load, a drop, a registration or an unreported result is pending."""
        return self.is_loading or self.has_news or self._table.has_removed or bool(self._registering)

    @property
    def is_loading(self) -> bool:
        """Whether a load is in flight or queued."""
        return self._table.is_loading

    @property
    def has_news(self) -> bool:
        """Whether loads have ended that no report has included."""
        return self._table.has_news

    def register(self, source: AdapterSource) -> Future[LoadedAdapter]:
        """Register an adapter and load it.

        Returns:
            Future of the loaded adapter. It raises `AdapterError` if the files cannot be loaded (the adapter is then
            unregistered), or if the adapter is removed before its load starts.
        """
        ready = Future[LoadedAdapter]()
        self._table.register(source)
        self._registering[source.number] = source, ready
        self.start()
        return ready

    def start(self) -> None:
        """Start the drops and loads that the table has decided. Call it before the next step is launched: steps and
        drops run in order."""
        drops, loads = self._table.pop_decisions()
        for number in drops:
            self._drop(number)
        for source in loads:
            self._in_flight[source.number] = self._load(source)

    def wait(self) -> None:
        """Wait until a load ends, for at most `_WAIT_S`."""
        if self._in_flight:
            wait(self._in_flight.values(), _WAIT_S, FIRST_COMPLETED)

    def collect(self, is_used: Callable[[int], bool]) -> dict[int, str]:
        """Process the loads that have ended, and start the next ones.

        Args:
            is_used: whether a request uses the adapter of this number. A removed adapter is kept while one does.

        Returns:
            Error message by number of each adapter that failed to load. Requests that wait for it end with this error.

        Raises:
            EngineDeadError: a rank that loads the adapter has died.
        """
        failed: dict[int, str] = {}
        for number, load in [(number, load) for number, load in self._in_flight.items() if load.done()]:
            del self._in_flight[number]
            if (error := self._ended(number, load)) is not None:
                failed[number] = error
        self._table.drop_removed(is_used)
        for number, (source, ready) in list(self._registering.items()):
            if not self._table.has(number):
                del self._registering[number]
                ready.set_exception(AdapterError(failed.get(number) or _REMOVED.format(name=source.name)))
        self.start()
        return failed

    def _ended(self, number: int, load: Future[LoadedAdapter]) -> str | None:
        """Process a load that has ended. Returns its error message, or None."""
        source = self._table.source_of(number)
        error = load.exception()
        if isinstance(error, EngineDeadError):
            raise error
        if error is None and source.digest in ("", load.result().digest):
            self._table.loaded(number, load.result())
            _, ready = self._registering.pop(number, (source, None))
            if ready is not None:
                ready.set_result(load.result())
            return None
        if error is None:
            self._drop(number)
            sentence = f"the files of LoRA adapter {source.name} in {source.path} have changed since it was loaded"
            logger.error("%s", sentence)
        elif isinstance(error, AdapterError):
            sentence = str(error)
            logger.error("LoRA adapter %s: %s", source.name, sentence)
        else:  # an internal error: a failing adapter must not stop the engine
            logger.error("LoRA adapter %s cannot be loaded", source.name, exc_info=error)
            sentence = f"LoRA adapter {source.name} cannot be loaded; see the log"
        self._table.failed(number)
        return sentence
