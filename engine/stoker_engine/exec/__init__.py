"""Runs steps on devices, in this process or in rank processes."""
