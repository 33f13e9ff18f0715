"""Quantization of a checkpoint's weights, read from its config.json: one file per method."""
