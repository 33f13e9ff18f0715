"""Interface of a parsed ``quantization_config``, which every method implements."""

from __future__ import annotations

from typing import Protocol

from stoker_engine.architectures.stored_formats import GroupFormat


class QuantizationConfig(Protocol):
    """A checkpoint's parsed ``quantization_config``.

    Attributes:
        method: name of the method, as accepted by ``--quantization``.
    """

    @property
    def method(self) -> str:
        """See the class."""
        ...

    def format_of(self, module: str, outputs: int, inner: int) -> GroupFormat | None:
        """Return the format of a module's matrix in memory, after loading.

        Args:
            module: name in the checkpoint, for example ``model.layers.0.self_attn.q_proj``.
            outputs, inner: shape of the matrix.

        Returns:
            None: not quantized.

        Raises:
            ModelError: the format is not supported; the message states the remedy.
        """
        ...

    def rows_of(self, module: str) -> int:
        """Return the rows per scale of a module's matrix in the files; 0: all. In memory, each row has its scales."""
        ...
