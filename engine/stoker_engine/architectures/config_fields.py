"""The fields of a config.json, under any of their names, with the family's defaults.

A file leaves out whatever equals its family's default, and the same thing has several names (``hidden_size``,
``n_embd``, ``d_model``). Code uses one name, transformers' general one. An explicit null is an answer: it
overrides the default (``"sliding_window": null`` means no window).
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from stoker_common.errors import ModelError

T = TypeVar("T")

#: The largest and smallest of float32; beyond them arithmetic overflows, or divides by zero.
_LARGEST: Final = 3.4e38
MIN_POSITIVE: Final = 1.2e-38

#: No model has as many of anything; what is larger is a mistake, and sums of it would be too.
_MOST: Final = 2**31 - 1

_LONGEST_WORD: Final = 200

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
    """A parsed config.json, whose every value may be anything.

    Each method but `get` raises `ModelError` where a value is not of its type.

    Args:
        given: what the file says.
        defaults: what it may leave unsaid, under the general names.
        names: for a general name, the one that goes before it in this family's files.
        file: what errors call it.
    """

    def __init__(
        self,
        stated: Mapping[str, Any],
        defaults: Mapping[str, Any],
        names: Mapping[str, str] | None = None,
        file: str = "config.json",
    ) -> None:
        self._stated, self._defaults, self._names, self._file = stated, defaults, names or {}, file

    def get(self, name: str) -> Any:
        """The field's value, or None.

        A null under one name gives way to a value under another (``"n_inner": null`` says nothing).
        """
        names = (self._names.get(name, name), name, *_OTHER_NAMES.get(name, ()))
        stated = [self._stated[alias] for alias in names if alias in self._stated]
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
            raise ModelError(f"{self._file} has no {name!r}")
        return value

    def integer(self, name: str, lower: int = 1, upper: int = _MOST) -> int:
        """A number without fraction that must be there."""
        value = self.number(name, lower, upper)
        if value != int(value):
            raise self._wrong(name, "a whole number", value)
        return int(value)

    def optional_integer(self, name: str, lower: int = 0) -> int | None:
        """A number without fraction, or None."""
        return None if self.get(name) is None else self.integer(name, lower)

    def number(self, name: str, lower: float = -math.inf, upper: float = math.inf) -> float:
        """A finite number that must be there."""
        value = self.required(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number", value)
        if not lower <= value <= upper or not abs(value) <= _LARGEST:
            span = f" from {lower:g}" * math.isfinite(lower) + f" to {upper:g}" * math.isfinite(upper)
            raise self._wrong(name, f"a number{span}", value)
        return float(value)

    def optional(self, name: str, lower: float = -math.inf) -> float | None:
        """A finite number, or None."""
        return None if self.get(name) is None else self.number(name, lower)

    def text(self, name: str) -> str:
        """A word that must be there."""
        value = self.required(name)
        if not isinstance(value, str) or len(value) > _LONGEST_WORD:
            raise self._wrong(name, "a word", value)
        return value

    def flag(self, name: str) -> bool:
        """Whether the field is true; absent is false."""
        value = self.get(name)
        if value not in (None, False, True):
            raise self._wrong(name, "true or false", value)
        return bool(value)

    def items(self, name: str, kind: type[T]) -> list[T]:
        """A list of values of `kind`; absent is empty."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list | tuple) or not all(type(item) is kind for item in value):
            raise self._wrong(name, f"a list of {kind.__name__}", value)
        return list(value)

    def object(self, name: str) -> Mapping[str, Any]:
        """A config within the config; absent is empty."""
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self._wrong(name, "an object", value)
        return value

    def _wrong(self, name: str, expected: str, value: Any) -> ModelError:
        return ModelError(f"{self._file}: {name} must be {expected}, not {reprlib.repr(value)}")
