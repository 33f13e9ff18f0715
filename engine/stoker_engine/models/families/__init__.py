"""Families' weight names: which tensor of a checkpoint fills which parameter."""
