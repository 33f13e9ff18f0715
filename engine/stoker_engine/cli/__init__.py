"""The engine's commands: `serve`, `run_batch`, `chat`, `bench` and others. Each `main` takes the arguments after the
command's name."""
