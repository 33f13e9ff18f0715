"""The engine's commands: `serve`, `run_batch`, `chat`, `bench`. Each is a function of the words after its name."""
