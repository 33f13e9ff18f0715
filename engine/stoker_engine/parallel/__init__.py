"""The device, the ranks that share a model, and what crosses between host and device."""
