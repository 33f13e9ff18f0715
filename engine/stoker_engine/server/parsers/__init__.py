"""Parsers of model output: reasoning, answer, tool calls."""
