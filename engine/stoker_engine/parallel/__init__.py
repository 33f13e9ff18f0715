"""Devices, and later the process groups of tensor, pipeline, data and expert parallelism."""
