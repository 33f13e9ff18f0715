"""GGUF files: header, config and tensors."""
