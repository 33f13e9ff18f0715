"""What a request is, on its way through the engine. Torch-free."""
