"""Parts of the operator's process: logs, metrics, health, an HTTP server, background threads."""
