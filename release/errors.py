"""The error that the commands of this folder report without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable


class ReleaseError(Exception):
    """A release cannot be built; the message says why, and what to do."""


def exit_code(program: str, main: Callable[[], None]) -> int:
    """Run a command; return 0, 2 after its error was printed, or 130 if it was interrupted."""
    try:
        main()
    except ReleaseError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
