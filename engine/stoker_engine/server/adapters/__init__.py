"""Served LoRA adapters: the registry, the allowed folders, and the config file."""
