"""What a model wrote, taken apart: reasoning, answer, calls of tools."""
