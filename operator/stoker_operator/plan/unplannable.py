"""The exception for a valid spec whose model cannot run."""

from __future__ import annotations

from stoker_operator.api.violation import Refused


class Unplannable(Refused):
    """The spec obeys all rules of the API, but its model cannot run in this way."""
