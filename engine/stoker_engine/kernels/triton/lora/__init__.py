"""LoRA: rows in tiles of one adapter, multiplied by its A (shrink) and then by its B (expand)."""
