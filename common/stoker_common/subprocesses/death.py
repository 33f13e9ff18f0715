"""What ended a child process: its own last message, or what the kernel says of it."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stoker_common.errors import EngineDeadError, EngineKilledError, EngineOutOfMemoryError

#: How a process ends by its own mistake; other signals come from outside.
_CRASHES: Final = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP}
)


@dataclass(frozen=True)
class Died:
    """A child process ends by an error of its own: its last message.

    Attributes:
        message: the error's kind and words; of another process's death, the sentence that says of what.
        kind: what sort of death it is.
        of_another: it ends because a process died that it cannot be without.
    """

    message: str
    kind: type[EngineDeadError] = EngineDeadError
    of_another: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Died:
        """The last message of a process that ends by `error`."""
        if isinstance(error, EngineDeadError):
            return cls(error.message, type(error), of_another=True)
        kind = EngineOutOfMemoryError if _is_out_of_memory(error) else EngineDeadError
        return cls(f"{type(error).__name__}: {error}", kind)


def cause_of_death(code: int, died: Died | None, killed_for_memory: bool, subject: str = "it") -> EngineDeadError:
    """Why a child process ended.

    Args:
        code: its exit code; -N: it was ended by signal N.
        died: its last message, where it sent one.
        killed_for_memory: whether the kernel has killed a process for want of memory since it started.
        subject: the subject of the sentence.
    """
    if died is not None:
        if died.of_another:
            return died.kind(died.message)
        prefix = "" if subject == "it" else f"{subject} ended by "
        return died.kind(f"{prefix}{died.message} (exit code {code}; the log says more)")
    if code == -signal.SIGKILL and killed_for_memory:
        return EngineOutOfMemoryError(f"the kernel killed {subject} because the container's memory ran out (SIGKILL)")
    if code == -signal.SIGKILL:
        return EngineKilledError(f"{subject} was killed by signal 9 (SIGKILL), maybe because memory ran out")
    if code < 0:
        death = EngineDeadError if -code in _CRASHES else EngineKilledError
        return death(f"{subject} was killed by signal {-code} ({_signal_name(-code)})")
    return EngineDeadError(f"{subject} ended with exit code {code}; its log says why")


def process_state(pid: int) -> bytes | None:
    """A process's state as Linux writes it (R, S, T …); None where there is no such process, or no Linux."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return stat.rpartition(b")")[2].split()[0]


def is_stopped(state: bytes | None) -> bool:
    """Whether a process in that state lives and is stopped (SIGSTOP, a debugger, a frozen container)."""
    return state in (b"T", b"t")


def _is_out_of_memory(error: BaseException) -> bool:
    """torch has an error of that name for devices, and none for the CPU's memory."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


def _signal_name(number: int) -> str:
    """A signal's name; real-time signals have none, but the system has words for them."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return signal.strsignal(number) or "unknown"
