"""GGUF files: metadata, which replace config.json, and names of weights."""
