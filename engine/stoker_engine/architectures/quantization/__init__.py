"""Quantization of weights: as config.json states it, and on load."""
