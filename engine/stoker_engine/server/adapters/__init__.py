"""LoRA adapters as the server serves them: which there are, where they may come from, and the file that lists them."""
