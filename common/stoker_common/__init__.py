"""Code that the engine, the operator and the gateway share: errors, model sources, prefix hashes, scaling reports."""
