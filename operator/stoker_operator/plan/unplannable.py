"""The exception for a valid spec whose model cannot run on its accelerators."""

from __future__ import annotations

from stoker_operator.api.violation import Refused


class Unplannable(Refused):
    """The spec obeys all rules, but the model cannot run in this way because of heads, memory, lengths or dtypes."""
