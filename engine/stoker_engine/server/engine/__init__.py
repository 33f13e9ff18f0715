"""Interface of the engine, admission, restarts, shutdown, and what several front ends share."""
