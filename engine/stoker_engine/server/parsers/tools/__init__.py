"""How models write calls of tools: a format a file."""
