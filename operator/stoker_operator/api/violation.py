"""What is wrong with a manifest, where, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """One thing wrong.

    Attributes:
        field: path of the field, as ``kubectl explain`` takes it (``spec.parallelism``).
        message: what is wrong.
        remedy: what to write instead; empty where the message says it all.
        reason: one CamelCase word for the condition that reports it.
    """

    field: str
    message: str
    remedy: str = ""
    reason: str = "Invalid"

    def __str__(self) -> str:
        return f"{self.field}: {self.sentence}"

    @property
    def sentence(self) -> str:
        """Message and remedy without the field."""
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class Refused(Exception):  # noqa: N818 - it is the manifest that is wrong, not we
    """A manifest that cannot be accepted, with everything that is wrong with it."""

    def __init__(self, *violations: Violation) -> None:
        super().__init__("\n".join(map(str, violations)))
        self.violations = violations
