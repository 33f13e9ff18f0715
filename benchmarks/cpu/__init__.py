"""CPU benchmark of Stoker and other engines, run by ``make bench``; see `cpu.__main__`."""
