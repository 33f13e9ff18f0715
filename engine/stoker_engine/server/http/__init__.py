"""The HTTP server: sockets, uvicorn's protocol, and limits on slow clients."""
