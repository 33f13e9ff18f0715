"""Engines with adapters, for `lora_throughput`: one module each, for `cpu.engines.worker`.

Requests use the adapters of ``$ADAPTERS``, a list of folders in JSON, in turn.
"""

from __future__ import annotations

import json
import os
from pathlib import Path


def adapter_folders() -> list[str]:
    """Return the adapters' folders."""
    folders: list[str] = json.loads(os.environ["ADAPTERS"])
    return folders


def rank() -> int:
    """Return the adapters' rank."""
    config = json.loads(Path(adapter_folders()[0], "adapter_config.json").read_text())
    return int(config["r"])
