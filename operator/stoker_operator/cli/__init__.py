"""The operator's commands; each takes the words after its name and returns the exit code."""
