"""The engines: one file each, which says how it is installed, what it loads, and how requests are given to it."""
