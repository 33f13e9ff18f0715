"""The limit of open files: each connection needs one, and shells and containers often permit 1,024."""

from __future__ import annotations

import logging
import resource
from typing import Final

logger = logging.getLogger(__name__)

#: Number of open files that a server may have. More would not help it, and some programs loop over all permitted ones.
_FILES: Final = 65_536


def raise_limit() -> None:
    """Raise this process's limit of open files, which its children inherit, if its hard limit permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (OSError, ValueError) as error:
        logger.warning("the limit of open files stays at %d: %s; each connection needs a file", soft, error)
        return
    logger.info("raised the limit of open files from %d to %d; each connection needs one", soft, limit)
