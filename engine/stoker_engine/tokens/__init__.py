"""Text ⇄ tokens."""
