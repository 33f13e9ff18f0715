"""``-f FILE``: reads a manifest from a file, and reports why it is refused."""

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
    """Add the arguments that all commands with a manifest have."""
    parser.add_argument("-f", "--filename", required=required, metavar="FILE", help="the manifest; - is standard input")
    parser.add_argument(
        "--catalogue", type=Path, metavar="FILE", help="additions and changes to the built-in accelerator catalogue"
    )


def read_text(filename: str) -> str:
    """Return the text of the file, or of standard input for ``-``.

    Raises:
        Refused: the file cannot be read.
    """
    try:
        return sys.stdin.read() if filename == "-" else Path(filename).read_text(encoding="utf-8")
    except OSError as error:
        raise Refused(Violation(filename, f"cannot be read: {error.strerror}")) from None
    except UnicodeDecodeError as error:
        raise Refused(Violation(filename, f"cannot be read: it is not UTF-8 ({error.reason})")) from None


def load(filename: str, catalogue: Catalogue) -> list[InferenceEndpoint]:
    """Return the endpoints in the file.

    Raises:
        Refused: the file cannot be read, or an endpoint is invalid.
    """
    return [parse_planned(document, catalogue) for document in documents(read_text(filename), filename)]


def parse_planned(document: Any, catalogue: Catalogue) -> InferenceEndpoint:
    """Parse a manifest. Remedies for wrong sizes are the planner's if it knows the model.

    Raises:
        Refused: the manifest violates the schema or a rule.
    """
    try:
        return parse(document)
    except Refused as refused:
        raise Refused(*planned_ways_out(document, refused.violations, catalogue, local_config)) from None


def load_one(filename: str, catalogue: Catalogue) -> InferenceEndpoint:
    """Return the only endpoint in the file.

    Raises:
        Refused: the file cannot be read, an endpoint is invalid, or there are several endpoints.
    """
    endpoints = load(filename, catalogue)
    if len(endpoints) > 1:
        names = ", ".join(endpoint.metadata.name for endpoint in endpoints)
        raise Refused(
            Violation(filename, f"the file contains several endpoints ({names})", "put each into its own file")
        )
    return endpoints[0]


def answer(command: str, run: Callable[[], int]) -> int:
    """Return the result of `run`. If it raises `Refused`, print the violations to standard error and return 2."""
    try:
        return run()
    except Refused as refused:
        for violation in refused.violations:
            print(f"stoker {command}: {violation}", file=sys.stderr)
        return 2
