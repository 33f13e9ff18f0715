"""Descriptions of errors, and their format in each API."""
