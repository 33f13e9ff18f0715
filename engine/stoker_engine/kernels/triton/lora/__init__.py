"""LoRA: tiles of rows with the same adapter are multiplied by its A (shrink), then by its B (expand)."""
