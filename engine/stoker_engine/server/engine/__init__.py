"""Interface of the engine, admission, restarts, shutdown."""
