"""Writes the file that becomes the pod's termination message."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from stoker_engine.contract.termination_message import TerminationMessage

logger = logging.getLogger(__name__)

#: Environment variable that names the file. If it is unset or empty, Kubernetes' default file is used if that file
#: exists.
VARIABLE: Final = "STOKER_TERMINATION_LOG"

_KUBERNETES: Final = "/dev/termination-log"


def write(message: TerminationMessage) -> None:
    """Write `message` if there is a file for it. A failed write is only logged."""
    named = os.environ.get(VARIABLE)
    file = Path(named or _KUBERNETES)
    if not named and not file.is_file():
        return
    try:
        file.write_text(str(message), encoding="utf-8")  # a line feed could exceed the size that Kubernetes keeps
    except OSError as error:
        logger.warning("cannot write the termination message to %s: %s", file, error)
