"""Mixture of experts: routing, alignment, and the sum of the experts' results."""
