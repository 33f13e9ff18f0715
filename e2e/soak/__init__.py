"""Half an hour of everything at once: see `soak.py`."""
