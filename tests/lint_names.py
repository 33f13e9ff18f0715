"""Finds retired names and archaic words, so that one concept keeps one word; exit code 1 if there are any.

Usage: ``python tests/lint_names.py``.

Retired names are those of docs/glossary.md's column "formerly" that were names of one thing only; words are those of
which plain English has a better one.
"""

from __future__ import annotations

import re
import subprocess
import sys
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
    "stoker_operator.granting", "TurnDelta", "wanted_format", "told_tools", "UnbuiltChat", "UnbuiltCompletion",
    "UnbuiltMessage", "StepMasksByPlace", "keep_to_own_part", "check_room", "is_waited_for", "take_copies",
    "take_table_changes", "lines_as_they_come", "mortal_add",
]
# fmt: on

#: The word, and what to write instead.
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
}

#: What keeps its words: history, fixtures of earlier releases, texts of others, and the names of public headers.
LEFT = re.compile(
    r"CHANGELOG\.md|docs/glossary\.md|tests/(test_)?lint_names\.py|tests/golden/|"
    r"benchmarks/(results|data)/|e2e/apiserver/\w+_release/"
)
NAME = re.compile(r"(?<![\w-])(" + "|".join(map(re.escape, [*RETIRED, *ARCHAIC])) + r")(?![\w-])")


def findings(path: str, text: str) -> list[str]:
    """A line for each retired name or archaic word of a file."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        for word in NAME.findall(line):
            instead = ARCHAIC.get(word, "see docs/glossary.md")
            found.append(f"{path}:{number}: {word!r} is retired: {instead}")
    return found


def main() -> int:
    """Prints what was found."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: list[str] = []
    for path in listed.stdout.splitlines():
        if LEFT.match(path) or not (ROOT / path).is_file():
            continue
        try:
            found += findings(path, (ROOT / path).read_text())
        except UnicodeDecodeError:
            continue
    sys.stdout.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
