"""Quantized checkpoints: a file for each method, which finds the tensors of matrices and converts them to blocks."""
