"""Dequantization of tiles of quantized matrices."""
