"""A spec that says what it may, of a model and accelerators that do not go together."""

from __future__ import annotations

from stoker_operator.api.violation import Refused


class Unplannable(Refused):
    """The spec obeys all rules, and there is no way to run this model so: heads, memory, lengths, dtypes."""
