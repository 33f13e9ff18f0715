"""Parser of a command's flags that suggests a similar flag for an unknown one."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose message about an unknown flag names a similar one."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """See ``ArgumentParser``; the process exits with code 2 if an argument is unknown."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown)}")
        return options

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
