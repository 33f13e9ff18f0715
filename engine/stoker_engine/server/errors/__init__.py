"""Errors as each API describes them."""
