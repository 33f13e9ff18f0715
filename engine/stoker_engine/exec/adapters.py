"""The LoRA adapters of a rank, as executors use them: loaded and dropped here, activated by the runner."""

from __future__ import annotations

from typing import Final, Protocol

from stoker_common.errors import AdapterError
from stoker_engine.core.adapter import AdapterSource, LoadedAdapter

#: Why no adapter can be loaded.
LORA_IS_OFF: Final = "LoRA is off; start the engine with --enable-lora"


class Adapters(Protocol):
    """The LoRA adapters of this rank."""

    def load(self, source: AdapterSource) -> LoadedAdapter:
        """Reads an adapter's files; in any thread, also while a step runs.

        Raises:
            AdapterError: they cannot be served, or are not those that `source` names.
        """
        ...

    def drop(self, number: int) -> None:
        """Frees the memory of an adapter, between steps."""
        ...

    def activate(self, slot: int, number: int) -> None:
        """Lets the rows with this slot use a loaded adapter, from the next step on."""
        ...


def load_adapter(adapters: Adapters | None, source: AdapterSource) -> LoadedAdapter:
    """Loads an adapter into this rank.

    Raises:
        AdapterError: it cannot be served here; or there is no LoRA.
    """
    if adapters is None:
        raise AdapterError(LORA_IS_OFF)
    return adapters.load(source)
