"""What any server process has: logs, metrics, health, an HTTP server, a background event loop."""
