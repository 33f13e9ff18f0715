"""The commands ``stoker gateway`` and ``stoker keys``."""
