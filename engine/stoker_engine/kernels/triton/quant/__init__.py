"""Packing of quantized matrices, and dequantization of their tiles and rows."""
