"""What the engine promises to the world outside its process: torch-free, and all the operator may import."""
