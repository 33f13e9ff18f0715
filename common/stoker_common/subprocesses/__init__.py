"""Child processes: how they end with their parent, and the cause of their death."""
