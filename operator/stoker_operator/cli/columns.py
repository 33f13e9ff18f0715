"""Text tables whose columns are as wide as their widest cell."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def columns(rows: Sequence[Sequence[str]], words: Collection[str]) -> list[str]:
    """Return a line for each row; the first row has the titles.

    Columns whose title is in `words` are left-aligned, the others right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_left_aligned = [title in words for title in rows[0]]
    return [
        "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, is_left_aligned, strict=True)
        ).rstrip()
        for row in rows
    ]
