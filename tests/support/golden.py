"""Golden files of public text on which users, dashboards and other programs rely.

A difference means a change of something public. If it is intended, `STOKER_GOLDEN=write make test K=golden` updates the
files, and the commit shows the change.
"""

from __future__ import annotations

import os
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

FOLDER = Path(__file__).parents[1] / "golden"


def check(name: str, text: str) -> None:
    """Compare `text` with the golden file `name`, or write the file if STOKER_GOLDEN says so."""
    golden = FOLDER / name
    if os.environ.get("STOKER_GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text(), f"{name} has changed; if that is intended: STOKER_GOLDEN=write"


def series(scrape: str, prefixes: tuple[str, ...]) -> str:
    """Return the metrics of a scrape without values: type, help, and each sample's labels.

    A histogram's buckets are one line.
    """
    lines = []
    for family in text_string_to_metric_families(scrape):
        if not family.name.startswith(prefixes) or family.name.endswith("_created"):
            continue
        lines.append(f"{family.name} {family.type}: {family.documentation}")
        samples = {
            (sample.name, *sorted(sample.labels.items()))
            for sample in family.samples
            if sample.labels.get("le", "+Inf") == "+Inf" and not sample.name.endswith("_created")
        }
        for name, *labels in sorted(samples):
            lines.append(f"    {name}{{{', '.join(f'{label}={value!r}' for label, value in labels)}}}")
    return "\n".join(lines) + "\n"
