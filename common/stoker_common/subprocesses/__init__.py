"""Processes that this one starts: how they end when it does, and what ended them."""
