"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# The same examples in each run, and no limit on the time of one: time is noisy.
settings.register_profile("stoker", deadline=None, derandomize=True)
settings.load_profile("stoker")
