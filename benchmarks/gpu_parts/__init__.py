"""The parts of `gpu.py`: each is measured in a process of its own (`registry`)."""
