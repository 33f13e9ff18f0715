"""GGUF files: header, tensors, names, and the families that they describe."""
