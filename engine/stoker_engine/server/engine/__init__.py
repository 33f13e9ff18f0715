"""The server's view of the engine: client protocol, admission, restarts, shutdown."""
