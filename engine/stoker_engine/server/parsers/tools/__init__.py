"""Tool call formats of models, one per file."""
