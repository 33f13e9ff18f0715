"""How models set their reasoning apart: a format a file."""
