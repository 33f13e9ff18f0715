"""Tiles of quantized matrices, as the values that they stand for."""
