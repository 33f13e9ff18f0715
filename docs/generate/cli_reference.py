"""The page of the commands, from their parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from itertools import groupby

from command_parsers import commands, parsers
from markdown_text import code, prose, table

from stoker import main as dispatcher

_HEAD = """# Commands

This page is generated from the commands' parsers (`make generate`); `stoker COMMAND --help` shows the same in a
terminal. Each command needs an extra of the Python package: in a checkout `pip install -c constraints.txt '.[engine]'`,
for example. A command exits with 2 if its command line is invalid. Integers of the engine's commands may have a suffix:
`8k` is 8,000 and `8K` is 8,192.
"""
#: Titles that argparse gives to groups without one.
_PLAIN = {"positional arguments", "options"}
_DEFAULT = re.compile(r"\s*\(default: (.*)\)$|[;.] ?default: (.*)$", re.DOTALL)


def page() -> str:
    """Return the page, in Markdown."""
    rows = [
        (f"[{code(f'stoker {name}')}](#stoker-{name})", ", ".join(map(code, entry.extras)), dispatcher.SUMMARIES[name])
        for name, entry in commands().items()
        if entry.module.startswith("stoker")
    ]
    lines = [_HEAD, *table(("command", "extra", "purpose"), rows)]
    shared: dict[str, list[str]] = {}
    for name, members in groupby(parsers(), key=lambda each: each[0].partition(" ")[0]):
        if name not in dispatcher.SUMMARIES:
            continue  # another installed package's
        found = list(members)
        lines += [f"## stoker {name}", ""]
        if len(found) == 1:
            lines += _command(found[0][1], 3, shared)
            continue
        lines += [f"{_capital(dispatcher.SUMMARIES[name])}.", ""]
        for words, parser in found:
            lines += [f"### stoker {words}", "", *_command(parser, 4, shared)]
    return "\n".join(lines).rstrip() + "\n"


def _command(parser: argparse.ArgumentParser, level: int, shared: dict[str, list[str]]) -> Iterator[str]:
    """Yield the description of a command and its flags by group.

    Args:
        level: level of the groups' headings.
        shared: groups of `stoker serve`, the first command, by title; other commands refer to equal groups.
    """
    if parser.description:
        yield from (prose(parser.description), "")
    below: dict[str, argparse.ArgumentParser] = {}
    same = []
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        for action in actions:
            if isinstance(action, argparse._SubParsersAction):
                below.update(action.choices)
        flags = [action for action in actions if not isinstance(action, argparse._SubParsersAction)]
        rows = [(_name(action), *_meaning(action)) for action in flags]
        lines = table(("flag" if group.title != "positional arguments" else "argument", "default", "meaning"), rows)
        if group.title and group.title not in _PLAIN and rows:
            if parser.prog == "stoker serve":
                shared[group.title] = lines
            elif shared.get(group.title) == lines:
                same.append(group.title)
                continue
            yield from (f"{'#' * level} {_capital(group.title)}", "")
            if group.description:
                yield from (prose(group.description), "")
        yield from lines
    if same:
        groups = ", ".join(map(_capital, same))
        yield from (f"These groups of flags are those of [`stoker serve`](#stoker-serve), too: {groups}.", "")
    for name, each in below.items():
        yield from (f"{'#' * level} {each.prog.removesuffix(name).strip()} {name}", "")
        yield from _command(each, level + 1, shared)
    if parser.epilog:
        example = parser.epilog.removeprefix("example: ")
        yield from (prose(example), "") if example == parser.epilog else ("Example:", "", "```sh", example, "```", "")


def _name(action: argparse.Action) -> str:
    """Return a flag's spellings with its value, or an argument's name."""
    if not action.option_strings:
        return code(str(action.metavar or action.dest))
    value = "" if action.nargs == 0 else f" {_value(action)}"
    return ", ".join(code(f"{option}{value}") for option in action.option_strings)


def _value(action: argparse.Action) -> str:
    if action.metavar is None and action.choices:
        return "|".join(map(str, action.choices)) if len(list(action.choices)) <= 4 else _placeholder(action)
    word = action.metavar if isinstance(action.metavar, str) else _placeholder(action)
    return f"{word} ..." if action.nargs in ("+", "*") else word


def _placeholder(action: argparse.Action) -> str:
    return action.dest.rsplit("_", 1)[-1].upper()


def _meaning(action: argparse.Action) -> tuple[str, str]:
    """Return a flag's default and its help, which states the default at its end."""
    text = " ".join((action.help or "").replace("%%", "%").split()).replace("%(default)s", str(action.default))
    default = ""
    if found := _DEFAULT.search(text):
        default = found[1] or found[2] or ""
        text = text[: found.start()]
    if action.choices and len(list(action.choices)) > 4:
        text = f"{text}; one of {', '.join(map(str, action.choices))}" if text else ", ".join(map(str, action.choices))
    if action.required and action.option_strings:
        default = "required"
    return _default(default, action), prose(text)


def _default(text: str, action: argparse.Action) -> str:
    """Return a default as code if it is a value, else as text."""
    if action.nargs == 0 and text in ("True", "False"):
        return "on" if text == "True" else "off"
    return code(text) if text and text == str(action.default) else prose(text)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
