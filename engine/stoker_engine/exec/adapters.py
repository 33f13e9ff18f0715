"""Interface of a rank's LoRA adapters: executors load and drop them, the runner activates them in slots."""

from __future__ import annotations

from typing import Final, Protocol

from stoker_common.errors import AdapterError
from stoker_engine.core.adapter import AdapterSource, LoadedAdapter

#: Error of a load if the engine was started without LoRA.
LORA_IS_OFF: Final = "LoRA is off; start the engine with --enable-lora"


class Adapters(Protocol):
    """The LoRA adapters of this rank."""

    def load(self, source: AdapterSource) -> LoadedAdapter:
        """Load an adapter into memory. Thread-safe; may run during a step.

        Raises:
            AdapterError: the files cannot be loaded, or do not match `source`.
        """
        ...

    def drop(self, number: int) -> None:
        """Free the memory of the adapter with this number, which no later step uses. Called between steps."""
        ...

    def activate(self, slot: int, number: int) -> None:
        """Assign the loaded adapter with this number to a slot. Called between steps."""
        ...


def load_adapter(adapters: Adapters | None, source: AdapterSource) -> LoadedAdapter:
    """Load an adapter into this rank.

    Raises:
        AdapterError: the adapter cannot be loaded, or LoRA is off.
    """
    if adapters is None:
        raise AdapterError(LORA_IS_OFF)
    return adapters.load(source)
