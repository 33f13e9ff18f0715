"""Child processes: their end with the parent, and the cause of their death."""
