"""The operator's commands. Each takes the arguments after its name and returns the exit code."""
