"""Shows the progress of loading: a bar on a terminal, else log lines at intervals."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from tqdm import tqdm

logger = logging.getLogger(__name__)

#: Interval between log lines, in seconds.
_LOG_S: Final = 10.0


class LoadingView:
    """Shows the bytes of weights that are loaded; see `models.loading.load_progress.OnProgress`.

    Args:
        on_progress: called in addition whenever loading progresses.
    """

    def __init__(self, on_progress: Callable[[], None]) -> None:
        self._on_progress = on_progress
        self._bar: tqdm[Any] | None = None
        self._last_logged = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Report that `done` of `total` bytes are loaded. `total` 0: progress without bytes, which is not shown."""
        self._on_progress()
        if not total:
            return
        if self._bar is None:
            self._bar = tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=None)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
        if self._bar.disable and (now := time.monotonic()) >= self._last_logged + _LOG_S:
            self._last_logged = now
            logger.info("loading: %.1f of %.1f GB of weights (%d%%)", done / 1e9, total / 1e9, 100 * done // total)
