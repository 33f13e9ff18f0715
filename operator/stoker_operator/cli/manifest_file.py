"""``-f FILE``: a manifest from a file, and what is said when it is refused."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker_operator.api.manifest import documents, parse
from stoker_operator.api.v1alpha1 import InferenceEndpoint
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.cli.local_config import local_config
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.planner import planned_ways_out


def add_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds what every command that reads a manifest takes."""
    parser.add_argument("-f", "--filename", required=required, metavar="FILE", help="the manifest; - is standard input")
    parser.add_argument("--catalogue", type=Path, metavar="FILE", help="laid over the built-in accelerator catalogue")


def read_text(filename: str) -> str:
    """The file's text.

    Raises:
        Refused: it cannot be read.
    """
    try:
        return sys.stdin.read() if filename == "-" else Path(filename).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(Violation(filename, f"it cannot be read: {error}")) from None


def load(filename: str, catalogue: Catalogue) -> list[InferenceEndpoint]:
    """The endpoints in the file.

    Raises:
        Refused: it cannot be read, or something in it is wrong.
    """
    return [parse_planned(document, catalogue) for document in documents(read_text(filename))]


def parse_planned(document: Any, catalogue: Catalogue) -> InferenceEndpoint:
    """`parse`, of which the remedies for wrong sizes are planned.

    Raises:
        Refused: it breaks the schema, or a rule.
    """
    try:
        return parse(document)
    except Refused as refused:
        raise Refused(*planned_ways_out(document, refused.violations, catalogue, local_config)) from None


def load_one(filename: str, catalogue: Catalogue) -> InferenceEndpoint:
    """The one endpoint in the file.

    Raises:
        Refused: as `load`, or there are several.
    """
    endpoints = load(filename, catalogue)
    if len(endpoints) > 1:
        names = ", ".join(endpoint.metadata.name for endpoint in endpoints)
        raise Refused(Violation(filename, f"it holds several endpoints ({names})", "put one in a file"))
    return endpoints[0]


def answer(command: str, run: Callable[[], int]) -> int:
    """Runs `run`; a refused manifest is said on standard error, one line for each fault, and exits 2."""
    try:
        return run()
    except Refused as refused:
        for violation in refused.violations:
            print(f"stoker {command}: {violation}", file=sys.stderr)
        return 2
