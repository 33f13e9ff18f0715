"""Weights from files into parameters: sources, slices, quantization on load, progress."""
