"""Bytes in: bodies, and clients that hang up."""
