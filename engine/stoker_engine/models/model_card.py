"""Licence and title of a model.

In a Hugging Face folder they come from the model card ``README.md``, whose front matter may name the licence; otherwise
the first line of a licence file is used. A GGUF file has them in its metadata.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "USE_POLICY.md")


@dataclass(frozen=True)
class ModelCard:
    """Licence and title; None if not stated.

    Attributes:
        licence: name with the link, or first line of a licence file with the file's name.
        title: heading and path of the card; for GGUF the model's name and URL.
    """

    licence: str | None = None
    title: str | None = None


def card_of_folder(folder: Path) -> ModelCard:
    """Return the card of a Hugging Face folder. Front matter that is not valid YAML is ignored."""
    readme = folder / "README.md"
    matter, text = _front_matter(readme.read_text("utf-8-sig", errors="replace")) if readme.is_file() else ({}, "")
    licence = _joined(matter.get("license_name") or matter.get("license"), matter.get("license_link"))
    if licence is None:
        for path in (folder / name for name in _LICENCE_FILES):
            if path.is_file() and (line := _first_line(path.read_text("utf-8-sig", errors="replace"))):
                licence = f"{line} ({path.name})"
                break
    heading = _first_line("\n".join(line for line in text.split("\n") if line.startswith("# ")))
    return ModelCard(licence, _joined(heading, str(readme)) if readme.is_file() else None)


def card_of_gguf(field: Callable[[str], Any]) -> ModelCard:
    """Return the card from a GGUF file's metadata.

    Args:
        field: returns the value of a metadata key; None if the key is missing.
    """
    return ModelCard(
        licence=_joined(field("general.license.name") or field("general.license"), field("general.license.link")),
        title=_joined(field("general.name"), field("general.url") or field("general.repo_url")),
    )


def _joined(what: object, where: object) -> str | None:
    words = [str(word) for word in (what, where) if word]
    return f"{words[0]} ({words[1]})" if len(words) == 2 else (words[0] if words else None)


def _front_matter(text: str) -> tuple[dict[str, Any], str]:
    """Return the YAML between the two lines of dashes at the top, and the text after it."""
    lines = text.split("\n")
    if lines[:1] == ["---"] and "---" in lines[1:]:
        end = lines.index("---", 1)
        try:
            matter = yaml.safe_load("\n".join(lines[1:end]))
        except yaml.YAMLError:
            matter = None
        return (matter if isinstance(matter, dict) else {}), "\n".join(lines[end + 1 :])
    return {}, text


def _first_line(text: str) -> str | None:
    lines = (line.strip(" #*\t") for line in text.split("\n"))
    return next((line for line in lines if line), None)
