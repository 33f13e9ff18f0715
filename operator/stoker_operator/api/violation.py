"""Violations: the field, what is wrong, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """A reason to refuse a manifest, or another input of a command.

    Attributes:
        field: path of the field, as for ``kubectl explain`` (``spec.parallelism``), or another subject, such as a file.
        message: what is wrong.
        remedy: what to write instead; empty if the message suffices.
        reason: CamelCase reason of the condition that reports it.
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


class Refused(Exception):  # noqa: N818 - the manifest is wrong, not the operator
    """A manifest or another input is refused because of `violations`."""

    def __init__(self, *violations: Violation) -> None:
        super().__init__("\n".join(map(str, violations)))
        self.violations = violations
