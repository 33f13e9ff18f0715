"""Parser of a command's flags with short messages, which suggest a similar flag for an unknown one."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose messages omit the usage, and name a similar flag for an unknown one."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """See ``ArgumentParser``; the process exits with code 2 if an argument is unknown."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown)}")
        return options

    def error(self, message: str) -> NoReturn:
        """Print the message, as ``stoker serve`` prints its own, and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}\nTry '{self.prog} --help'.\n")

    def _hint(self, unknown: Sequence[str]) -> str:
        """Return a suggestion for the first unknown flag; empty if no flag is similar."""
        flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
        close = difflib.get_close_matches(flag.replace("_", "-"), sorted(self._flags()), n=1, cutoff=0.7)
        return f"; did you mean {close[0]}?" if close else ""

    def _flags(self) -> set[str]:
        """Return all flags, also those of subcommands."""
        parsers: list[argparse.ArgumentParser] = [self]
        flags = set[str]()
        while parsers:
            for action in parsers.pop()._actions:
                flags.update(action.option_strings)
                if isinstance(action, argparse._SubParsersAction):
                    parsers += action.choices.values()
        return flags
