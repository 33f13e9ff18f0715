"""The engine's interface to other processes: torch-free, and the only part that the operator may import."""
