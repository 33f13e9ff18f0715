"""An error of loading, as it crosses from a child process: exceptions themselves do not survive pickling."""

from __future__ import annotations

from dataclasses import dataclass

from stoker_common.errors import ArgumentError, StokerError


@dataclass(frozen=True)
class LoadFailed:
    """The model cannot be served; the user's to fix.

    Attributes:
        kind: of the error.
        argument: the flag that is wrong, where it is one.
    """

    kind: type[StokerError]
    message: str
    argument: str = ""

    @classmethod
    def of(cls, error: StokerError) -> LoadFailed:
        """What crosses of an error."""
        if isinstance(error, ArgumentError):
            return cls(ArgumentError, error.message, error.argument)
        return cls(type(error), str(error))

    def error(self) -> StokerError:
        """The error again."""
        return ArgumentError(self.argument, self.message) if self.argument else self.kind(self.message)
