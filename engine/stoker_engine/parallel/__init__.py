"""A rank's device, processors and memory, its transfers to the device, and its communication with other ranks."""
