"""The message by which a child process reports a loading error, because not all exceptions can be pickled."""

from __future__ import annotations

from dataclasses import dataclass

from stoker_common.errors import ArgumentError, StokerError


@dataclass(frozen=True)
class LoadFailed:
    """Message that loading failed with a `StokerError`.

    Attributes:
        kind: class of the error.
        message: its message.
        argument: the invalid flag, for an `ArgumentError`; otherwise empty.
    """

    kind: type[StokerError]
    message: str
    argument: str = ""

    @classmethod
    def of(cls, error: StokerError) -> LoadFailed:
        """Return the message for an error."""
        if isinstance(error, ArgumentError):
            return cls(ArgumentError, error.message, error.argument)
        return cls(type(error), str(error))

    def error(self) -> StokerError:
        """Return the reported error."""
        return ArgumentError(self.argument, self.message) if self.argument else self.kind(self.message)
