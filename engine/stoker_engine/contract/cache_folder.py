"""Folder for files that can be regenerated."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$STOKER_CACHE``, else ``$XDG_CACHE_HOME/stoker``, else ``~/.cache/stoker``."""
    if folder := os.environ.get("STOKER_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stoker"
