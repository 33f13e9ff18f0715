"""Half an hour of mixed traffic and random faults: see `soak.py`."""
