"""Parts of a server process: logs, metrics, health, an HTTP server, background threads."""
