"""Public names as golden files: commands with their flags, variables, labels, headers, metrics."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from stoker import main as dispatcher

from .support import golden

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "generate"))

from command_parsers import commands, parsers

ROOT = Path(__file__).parents[1]
SOURCES = ("cli", "common", "engine", "gateway", "operator", "charts", "images", "crds")
PATTERNS = {
    "environment variables": r"\bSTOKER_[A-Z_]*[A-Z]",
    "labels and annotations": r"\bstoker\.dev/[A-Za-z0-9.-]*[A-Za-z0-9]",
    "headers": r"(?i)\bx-stoker-[a-z-]*[a-z]",
    "metrics": r"\b(?:stoker|vllm):[a-z_]*[a-z]",
}


def _flags(parser: argparse.ArgumentParser, command: str) -> list[str]:
    """Return all options and arguments, independent of how this Python version prints them."""
    lines = [f"$ {command}"]
    below = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below += [(name, each) for name, each in action.choices.items()]
            continue
        facts: dict[str, Any] = {
            "takes": action.nargs,
            "choices": sorted(map(str, action.choices)) if action.choices else None,
            "default": action.default if isinstance(action.default, str | int | float | bool) else None,
            "required": action.required or None,
        }
        shown = {name: value for name, value in facts.items() if value is not None}
        lines.append(f"    {' '.join(action.option_strings) or action.dest} {json.dumps(shown)}")
        lines.append(f"        {' '.join((action.help or '').split())}")
    for name, each in below:
        lines += ["", *_flags(each, f"{command} {name}")]
    return lines


def test_golden_commands() -> None:
    text = [dispatcher.usage(commands()), ""]
    for words, parser in sorted(parsers(), key=lambda each: each[0].split(" ", 1)[0]):
        text += [*_flags(parser, f"stoker {words}"), ""]
    golden.check("commands.txt", "\n".join(text))


def test_golden_names() -> None:
    files = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*")) if path.is_file()]
    texts = []
    for path in files:
        if path.suffix in {".pyc", ".so", ".o"} or "__pycache__" in path.parts:
            continue
        texts.append(path.read_text(errors="ignore"))
    lines = []
    for title, pattern in PATTERNS.items():
        names = sorted({name for text in texts for name in re.findall(pattern, text)})
        lines += [title, *(f"    {name}" for name in names), ""]
    golden.check("names.txt", "\n".join(lines))
