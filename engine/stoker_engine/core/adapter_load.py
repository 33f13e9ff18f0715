"""Loads of a LoRA adapter by several processes, which succeed in all of them or in none."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

from stoker_common.errors import AdapterError, StokerError
from stoker_engine.core.adapter import AdapterSource, LoadedAdapter


class AdapterLoad:
    """The load of one adapter in progress.

    Args:
        processes: names, for messages, of the processes that load the adapter. If several fail, the error of the first
            in this order is reported.
        if_different: verb phrase of the error message for the case that the processes have read different files, with
            the remedy.

    Attributes:
        ready: future of the load; its result is that of the process with the longest load.
    """

    def __init__(self, source: AdapterSource, processes: Iterable[str], if_different: str) -> None:
        self.ready = Future[LoadedAdapter]()
        self._source, self._if_different = source, if_different
        self._answers: dict[str, LoadedAdapter | str | None] = dict.fromkeys(processes)

    def answer(self, process: str, loaded: LoadedAdapter | None, error: str | None) -> bool:
        """Record the answer of a process. Return whether all have answered."""
        self._answers[process] = loaded or error or "it did not load the adapter"
        return all(answer is not None for answer in self._answers.values())

    def has_loaded(self, process: str) -> bool:
        """Whether a process has loaded the adapter."""
        return isinstance(self._answers[process], LoadedAdapter)

    def error(self) -> AdapterError | None:
        """Return the error of the load, or None if all processes loaded the same files. Called after all have
        answered."""
        errors = {process: answer for process, answer in self._answers.items() if isinstance(answer, str)}
        if errors:
            process, error = next(iter(errors.items()))
            is_everywhere = len(errors) == len(self._answers) and len(set(errors.values())) == 1
            return AdapterError(error if is_everywhere else f"{process}: {error}")
        digests = {
            process: loaded.digest for process, loaded in self._answers.items() if isinstance(loaded, LoadedAdapter)
        }
        if len(set(digests.values())) == 1:
            return None
        found = ", ".join(f"{process}: {digest[:12]}" for process, digest in digests.items())
        name, path = self._source.name, self._source.path
        return AdapterError(f"the files of LoRA adapter {name} in {path} {self._if_different} ({found})")

    def end(self, error: StokerError | None) -> None:
        """Complete `ready` with the result or with `error`."""
        if error is not None:
            self.ready.set_exception(error)
        else:
            loaded = [answer for answer in self._answers.values() if isinstance(answer, LoadedAdapter)]
            self.ready.set_result(max(loaded, key=lambda each: each.seconds))
