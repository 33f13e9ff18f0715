"""The operator's commands. Their `main` takes the arguments after the command's name and returns the exit code."""
