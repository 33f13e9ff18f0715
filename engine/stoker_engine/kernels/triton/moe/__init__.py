"""Mixture of experts: routing, alignment, and the sum of experts' results."""
