"""The engine's commands: `serve`, `run_batch`, `chat`, `bench` and others. Each takes the words after its name."""
