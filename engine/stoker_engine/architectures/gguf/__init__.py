"""What GGUF files say of their models: metadata in place of a config.json, and names of weights."""
