"""Which parsers a model needs, from its chat template: only where that is sure."""

from __future__ import annotations


def tool_call_parser(template: str | None) -> str | None:
    """How the model of this chat template writes calls; None where that is not sure."""
    return None


def reasoning_parser(template: str | None) -> str | None:
    """How the model of this chat template sets its reasoning apart; None where that is not sure."""
    return None
