"""The fields of a config.json, under any of their names, with the family's defaults.

A file leaves out whatever equals its family's default, and the same thing has several names (``hidden_size``,
``n_embd``, ``d_model``). Code asks for one name, transformers' general one. An explicit null is an answer: it
overrides the default (``"sliding_window": null`` means no window).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stoker_engine.contract.errors import ModelError

#: Other names by which files state a field.
_OTHER_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "head_dim": ("kv_channels",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length", "n_ctx"),
    "hidden_act": ("hidden_activation", "activation_function", "activation"),
    "rms_norm_eps": ("layer_norm_epsilon",),
    "layer_norm_eps": ("layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "rope_theta": ("rotary_emb_base",),
    "partial_rotary_factor": ("rotary_pct", "rope_pct"),
    "sliding_window_pattern": ("_sliding_window_pattern",),
    "dtype": ("torch_dtype",),
}


class Fields:
    """A parsed config.json.

    Args:
        given: what the file says.
        defaults: what it may leave unsaid, under the general names.
        names: for a general name, the one that goes before it in this family's files.
    """

    def __init__(
        self, given: Mapping[str, Any], defaults: Mapping[str, Any], names: Mapping[str, str] | None = None
    ) -> None:
        self._given, self._defaults, self._names = given, defaults, names or {}

    def get(self, name: str) -> Any:
        """The field's value, or None.

        A null under one name gives way to a value under another (``"n_inner": null`` says nothing).
        """
        names = (self._names.get(name, name), name, *_OTHER_NAMES.get(name, ()))
        stated = [self._given[other] for other in names if other in self._given]
        if not stated:
            return self._defaults.get(name)
        return next((value for value in stated if value is not None), None)

    def required(self, name: str) -> Any:
        """The field's value.

        Raises:
            ModelError: there is none.
        """
        value = self.get(name)
        if value is None:
            raise ModelError(f"config.json has no {name!r}")
        return value

    def integer(self, name: str) -> int:
        """A number without fraction that must be there."""
        return int(self._number(name))

    def number(self, name: str) -> float:
        """A number that must be there."""
        return float(self._number(name))

    def optional(self, name: str) -> float | None:
        """A number, or None."""
        return None if self.get(name) is None else self.number(name)

    def text(self, name: str) -> str:
        """A word that must be there."""
        return str(self.required(name))

    def flag(self, name: str) -> bool:
        """Whether the field is true; absent is false."""
        return bool(self.get(name))

    def _number(self, name: str) -> Any:
        value = self.required(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"config.json: {name} must be a number, not {value!r}")
        return value
