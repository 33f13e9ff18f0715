"""Finds retired names, archaic words, and names that do not say what they hold; exit code 1 if there are any.

Usage: ``python tests/lint_names.py``.

Retired names are those in the column "formerly" of docs/reference/glossary.md that had a single meaning. Archaic words
have a replacement in plain English. Names of variables, parameters, attributes and functions must say what they hold or
do: `limit` or `reported`, not `most` or `told`. Names of tests must begin with the subject:
`test_requests_wait_until_the_restart_ends`, not `test_who_comes_meanwhile_waits`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# fmt: off
RETIRED = [
    "EngineCopy", "EngineCopies", "CopyRouter", "CopyState", "CopyWatch", "CopyMetrics", "NodeCopy", "num_copies",
    "copies_on", "RowState", "RowChanges", "Lineup", "place_in_line", "num_awaited", "_judge_draft", "MakeProduct",
    "MakeBlockProduct", "block_product", "fixed_product", "grouped_product", "grouped_block_product",
    "wide_product", "batched_product", "each_product", "turn_and_store", "store_latent", "join_rotated",
    "FusingBackend", "StoringBackend", "NativeBackend", "NativeProduct", "native_kernels", "native_library",
    "usable_levels", "in_eight_bits", "Specimen", "chip_of", "decode_parts", "PackedLater", "PackedSideBySide",
    "as_it_stays", "SharedRanks", "ProcessRanks", "StatusWord", "LastWords", "NotBegunError", "KeptGrammars",
    "Judgement", "SeenWorkload", "told_args", "OwnLoop", "asked_endpoint", "_hopeless", "WaitingLine", "Decider",
    "stoker_engine.children", "stoker_engine.kernels.native", "stoker_engine.contract.errors",
    "stoker_engine.contract.sources", "stoker_gateway.picker", "stoker_gateway.picking", "stoker_operator.judge",
    "stoker_operator.granting", "_told_length", "_as_told", "_became_ready", "_looked_at_hub", "_let_go",
    "_engine_told", "_until_the_next_list", "_judgement",
    "BlockProduct", "stoker_product", "stoker_angles", "CodedPanels", "TiledCodes",
    "TiledDigits", "TiledNumbers", "EightBits", "GroupPlace", "WORTH_SHARING", "shared_ranks", "turn_queries",
    "turn_scores", "gguf_numbers", "_over_keys", "_turn_and_store", "told_of_compiled", "each_level",
    "TurnDelta", "wanted_format", "told_tools", "UnbuiltChat", "UnbuiltCompletion",
    "UnbuiltMessage", "StepMasksByPlace", "keep_to_own_part", "check_room", "is_waited_for", "take_copies",
    "take_table_changes", "lines_as_they_come", "mortal_add", "HttpAsker", "hear_models", "ask_through",
    "ANNOUNCED_S",
]
# fmt: on

#: Archaic words and their replacement.
ARCHAIC = {
    "anew": "again",
    "begun": "started",
    "begun anew": "restarted",
    "likewise": "also, in the same way",
    "lest": "so that … not",
    "gone on with": "continued",
    "goes on with": "continues with",
    "go on with": "continue with",
    "had better": "should",
    "mend": "fix",
    "mended": "fixed",
    "mends": "fixes",
    "thrown back": "discarded",
    "as ever": "as always, as before",
    "whoever": "the client, process or user that …",
    "somebody": "another client, process or user",
    "anybody": "any client or user",
    "somebody's": "another owner's",
    "nobody's": "without an owner",
    "looks after": "watches, reconciles",
    "looked after": "watched, reconciled",
    "given back": "returned",
    "taken down": "recorded, stopped",
}

#: Forbidden names of variables, parameters, attributes and functions, also with leading underscores.
VAGUE = {"told", "said", "wanted", "its", "most", "here", "whose", "who", "place", "places"}

#: Names of tests without a subject.
WITHOUT_SUBJECT = re.compile(r"test_(what|whatever|who|whoever|it|its|they|those|nobody|somebody|one_that)_")

#: Excluded files: history, fixtures of earlier releases, texts of others, and names of public headers.
LEFT = re.compile(
    r"CHANGELOG\.md|docs/reference/glossary\.md|tests/(test_)?lint_names\.py|tests/golden/|"
    r"benchmarks/(results|data)/|e2e/apiserver/\w+_release/"
)
NAME = re.compile(r"(?<![\w-])(" + "|".join(map(re.escape, [*RETIRED, *ARCHAIC])) + r")(?![\w-])")


def findings(path: str, text: str) -> list[str]:
    """Return a line for each retired name or archaic word of a file."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        for word in NAME.findall(line):
            instead = ARCHAIC.get(word, "see docs/reference/glossary.md")
            found.append(f"{path}:{number}: {word!r} is retired: {instead}")
    return found


def vague(path: str, text: str) -> list[str]:
    """Return a line for each vague name that a Python file binds."""
    found = []
    for line, name in sorted(bound(ast.parse(text))):
        if name.lstrip("_") in VAGUE:
            found.append(f"{path}:{line}: {name!r} does not say what it holds")
        if WITHOUT_SUBJECT.match(name):
            found.append(f"{path}:{line}: {name!r} does not begin with the subject of the test")
    return found


def bound(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the lines and names of variables, parameters, attributes and functions bound in a syntax tree."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield node.lineno, name


def main() -> int:
    """Print the findings; return 1 if there are any."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: list[str] = []
    for path in listed.stdout.splitlines():
        if LEFT.match(path) or not (ROOT / path).is_file():
            continue
        try:
            text = (ROOT / path).read_text()
        except UnicodeDecodeError:
            continue
        found += findings(path, text)
        if path.endswith(".py"):
            found += vague(path, text)
    sys.stdout.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
