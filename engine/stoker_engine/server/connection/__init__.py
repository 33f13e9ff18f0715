"""Bytes in and out: the HTTP/1.1 protocol, bodies, server-sent events, clients that are slow or hang up."""
