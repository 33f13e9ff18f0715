"""Schedules the tokens of each step and allocates their KV-cache blocks. Torch-free."""
