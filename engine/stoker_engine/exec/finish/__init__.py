"""Processes the hidden states of a step."""
