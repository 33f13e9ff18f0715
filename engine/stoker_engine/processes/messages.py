"""What the two processes tell each other: these, and the core's own requests and outputs, pickled.

To the engine: `EngineArgs` first; then `EngineRequest`, `Abort`, `Stop`.
From it: `EngineInfo` or `LoadFailed` first; then `StepOutputs`.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_engine.contract.errors import ArgumentError, ModelError, StokerError


@dataclass(frozen=True)
class Abort:
    """Nobody wants a request's result any more."""

    request_id: str


@dataclass(frozen=True)
class Stop:
    """A stop string was found in the text of one sequence."""

    request_id: str
    index: int


@dataclass(frozen=True)
class LoadFailed:
    """The model cannot be served; the user's to mend.

    Attributes:
        argument: the flag that is wrong, where it is one.
    """

    message: str
    argument: str | None = None

    @classmethod
    def of(cls, error: StokerError) -> LoadFailed:
        """What crosses of an error: exceptions themselves do not survive pickling."""
        if isinstance(error, ArgumentError):
            return cls(error.message, error.argument)
        return cls(str(error))

    def error(self) -> StokerError:
        """The error again."""
        return ModelError(self.message) if self.argument is None else ArgumentError(self.argument, self.message)
