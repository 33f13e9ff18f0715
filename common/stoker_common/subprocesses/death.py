"""The cause of a child process's death: its last message, or its exit code or signal."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stoker_common.errors import EngineDeadError, EngineKilledError, EngineOutOfMemoryError

#: Signals of a crash of the process itself; other signals are taken to come from outside.
_CRASHES: Final = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP}
)


@dataclass(frozen=True)
class Died:
    """The last message of a child process that exits because of an error.

    Attributes:
        message: the error's class and message; if another process has died, only the message.
        kind: class of the error that the parent raises.
        of_another: whether the process exits because another process, which it needs, has died.
    """

    message: str
    kind: type[EngineDeadError] = EngineDeadError
    of_another: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Died:
        """Return the last message of a process that exits because of `error`."""
        if isinstance(error, EngineDeadError):
            return cls(error.message, type(error), of_another=True)
        kind = EngineOutOfMemoryError if _is_out_of_memory(error) else EngineDeadError
        return cls(f"{type(error).__name__}: {error}", kind)


def cause_of_death(
    code: int, died: Died | None, killed_for_memory: bool, subject: str | None = None
) -> EngineDeadError:
    """Return the cause of a child process's death.

    Args:
        code: the child's exit code; -N means that signal N killed it.
        died: the child's last message; None means that it sent none.
        killed_for_memory: whether the kernel has killed a process for lack of memory since the child started.
        subject: name of the child, for the message; None means the engine process.
    """
    if died is not None:
        if died.of_another:
            return died.kind(died.message)
        prefix = "" if subject is None else f"{subject} failed with "
        return died.kind(f"{prefix}{died.message} (exit code {code}; the log says more)")
    subject = subject or "the engine process"
    if code == -signal.SIGKILL and killed_for_memory:
        return EngineOutOfMemoryError(f"the kernel killed {subject} because the container's memory ran out (SIGKILL)")
    if code == -signal.SIGKILL:
        return EngineKilledError(f"{subject} was killed by signal 9 (SIGKILL), maybe because memory ran out")
    if code < 0:
        death = EngineDeadError if -code in _CRASHES else EngineKilledError
        return death(f"{subject} was killed by signal {-code} ({_signal_name(-code)})")
    return EngineDeadError(f"{subject} ended with exit code {code}; its log says why")


def process_state(pid: int) -> bytes | None:
    """Return a process's state in Linux's notation (R, S, T …); None if it does not exist, or on other systems."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return stat.rpartition(b")")[2].split()[0]


def is_stopped(state: bytes | None) -> bool:
    """Whether a process in that state is alive but stopped (SIGSTOP, a debugger)."""
    return state in (b"T", b"t")


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that memory ran out. torch's OutOfMemoryError is for devices; for the CPU it raises a plain
    error with the text below."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


def _signal_name(number: int) -> str:
    """Return a signal's name or, for one without a name, the system's description."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return signal.strsignal(number) or "unknown"
