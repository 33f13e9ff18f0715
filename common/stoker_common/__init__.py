"""What the engine, the operator and the gateway share: errors, model sources, prefix hashes, subprocess supervision."""
