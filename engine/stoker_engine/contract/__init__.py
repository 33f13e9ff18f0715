"""The engine's interface to other processes; does not import torch."""
