"""The server's logs."""
