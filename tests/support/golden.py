"""Golden files: what users, dashboards and other programs rely on, as text in the repository.

A difference shows that something public has changed. Where that is meant, `STOKER_GOLDEN=write make test K=golden`
writes the files again, and the commit shows what changed.
"""

from __future__ import annotations

import os
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

FOLDER = Path(__file__).parents[1] / "golden"


def check(name: str, text: str) -> None:
    """Compares `text` with the golden file `name`, or writes the file where STOKER_GOLDEN says so."""
    golden = FOLDER / name
    if os.environ.get("STOKER_GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text(), f"{name} has changed; where that is meant: STOKER_GOLDEN=write"


def series(scrape: str, prefixes: tuple[str, ...]) -> str:
    """The metrics of a scrape without their values: type, help, and each sample's labels.

    Buckets of a histogram are one line.
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
