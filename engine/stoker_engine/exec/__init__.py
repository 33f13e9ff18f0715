"""Runs batches on the device."""
