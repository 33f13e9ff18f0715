"""Sampling: token masks, sampling, argmax, log-probabilities."""
