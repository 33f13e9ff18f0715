"""Data types of requests, steps and outputs, which the parts of the engine exchange. Torch-free."""
