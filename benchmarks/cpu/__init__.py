"""Stoker beside other engines on this machine's processor: ``make bench``. `cpu.__main__` says how it goes."""
