"""What the two processes tell each other: these, and the core's own requests and outputs, pickled.

To the engine: `EngineArgs` first; then `EngineRequest`, `Abort`, `Stop`.
From it: `EngineInfo` or `LoadFailed` first; then `StepOutputs`; `Died` last, if it can still be said.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_engine.contract.errors import ArgumentError, StokerError


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
        kind: of the error.
        argument: the flag that is wrong, where it is one.
    """

    kind: type[StokerError]
    message: str
    argument: str = ""

    @classmethod
    def of(cls, error: StokerError) -> LoadFailed:
        """What crosses of an error: exceptions themselves do not survive pickling."""
        if isinstance(error, ArgumentError):
            return cls(ArgumentError, error.message, error.argument)
        return cls(type(error), str(error))

    def error(self) -> StokerError:
        """The error again."""
        return ArgumentError(self.argument, self.message) if self.argument else self.kind(self.message)


@dataclass(frozen=True)
class Died:
    """The engine ends by an error of its own: its last message.

    Attributes:
        message: the error's kind and words.
        out_of_memory: it was that memory ran out.
    """

    message: str
    out_of_memory: bool
