"""Which tokens are computed next, and where their keys and values go. Torch-free."""
