"""Fields of a config.json, under any of their names, with the family's defaults.

Files may omit values that equal their family's default, and the same field has several names (``hidden_size``,
``n_embd``, ``d_model``). The code uses transformers' general name. An explicit null overrides the default
(``"sliding_window": null`` means no window).
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from stoker_common.errors import ModelError

T = TypeVar("T")

#: Approximately the largest float32 value and the smallest normal one. Larger values would overflow; smaller divisors
#: may become 0.
_LARGEST: Final = 3.4e38
MIN_POSITIVE: Final = 1.2e-38

#: Maximum integer by default: no count or size in a model is larger.
_MOST: Final = 2**31 - 1

#: Maximum length of a string in characters.
_LONGEST_WORD: Final = 200

#: General name → other names of the field in files.
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
    """A parsed config.json, whose values are validated when they are read. A field with a default is never missing.

    All methods except `get` and `required` raise `ModelError` if the value has the wrong type or is out of range.

    Args:
        stated: content of the file.
        defaults: values of fields that the file may omit, by general name.
        names: general name → the family's own name of the field, which takes precedence.
        file: file name in error messages.
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
        """Return the field's first value that is not null under any of its names; None if there are only nulls; the
        default if the file has none of these names."""
        names = (self._names.get(name, name), name, *_OTHER_NAMES.get(name, ()))
        stated = [self._stated[alias] for alias in names if alias in self._stated]
        if not stated:
            return self._defaults.get(name)
        return next((value for value in stated if value is not None), None)

    def required(self, name: str) -> Any:
        """Return the field's value.

        Raises:
            ModelError: the field is missing or null.
        """
        value = self.get(name)
        if value is None:
            raise ModelError(f"{self._file} has no {name!r}")
        return value

    def integer(self, name: str, lower: int = 1, upper: int = _MOST) -> int:
        """Return a required integer from `lower` to `upper`."""
        value = self.number(name, lower, upper)
        if value != int(value):
            raise self._wrong(name, "a whole number", value)
        return int(value)

    def optional_integer(self, name: str, lower: int = 0) -> int | None:
        """Return an integer of at least `lower`, or None if the field is missing or null."""
        return None if self.get(name) is None else self.integer(name, lower)

    def number(self, name: str, lower: float = -math.inf, upper: float = math.inf) -> float:
        """Return a required finite number from `lower` to `upper`."""
        value = self.required(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number", value)
        if not lower <= value <= upper or not abs(value) <= _LARGEST:
            span = f" from {lower:g}" * math.isfinite(lower) + f" to {upper:g}" * math.isfinite(upper)
            raise self._wrong(name, f"a number{span}", value)
        return float(value)

    def optional(self, name: str, lower: float = -math.inf) -> float | None:
        """Return a finite number of at least `lower`, or None if the field is missing or null."""
        return None if self.get(name) is None else self.number(name, lower)

    def text(self, name: str) -> str:
        """Return a required string."""
        value = self.required(name)
        if not isinstance(value, str) or len(value) > _LONGEST_WORD:
            raise self._wrong(name, f"a string of at most {_LONGEST_WORD} characters", value)
        return value

    def flag(self, name: str) -> bool:
        """Return a boolean; False if the field is missing or null."""
        value = self.get(name)
        if value not in (None, False, True):
            raise self._wrong(name, "true or false", value)
        return bool(value)

    def items(self, name: str, kind: type[T]) -> list[T]:
        """Return a list of values of type `kind`; empty if the field is missing or null."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list | tuple) or not all(type(item) is kind for item in value):
            raise self._wrong(name, f"a list of {kind.__name__}", value)
        return list(value)

    def object(self, name: str) -> Mapping[str, Any]:
        """Return a nested object; empty if the field is missing or null."""
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self._wrong(name, "an object", value)
        return value

    def _wrong(self, name: str, expected: str, value: Any) -> ModelError:
        return ModelError(f"{self._file}: {name} must be {expected}, not {reprlib.repr(value)}")
