"""What every method's reading of ``quantization_config`` answers."""

from __future__ import annotations

from typing import Protocol

from stoker_engine.architectures.stored_formats import GroupFormat


class QuantizationConfig(Protocol):
    """A checkpoint's ``quantization_config``, understood.

    Attributes:
        method: its name, as ``--quantization`` takes it.
    """

    @property
    def method(self) -> str:
        """See the class."""
        ...

    def format_of(self, module: str, outputs: int, inner: int) -> GroupFormat | None:
        """How the matrix of one module is stored, once it is loaded.

        Args:
            module: its name in the checkpoint: ``model.layers.0.self_attn.q_proj``.
            outputs, inner: of its matrix.

        Returns:
            None: as numbers.

        Raises:
            ModelError: the format is not supported; the message states the remedy.
        """
        ...

    def rows_of(self, module: str) -> int:
        """How many rows of a module's matrix share each scale in the files; 0: all. In memory each row has its own."""
        ...
