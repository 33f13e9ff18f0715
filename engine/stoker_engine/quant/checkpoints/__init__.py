"""Quantized checkpoints: a file a method, which finds what matrices consist of and brings them into rows of blocks."""
