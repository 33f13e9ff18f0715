"""Code that the engine, the operator and the gateway share."""
