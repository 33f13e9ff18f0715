"""Computes how many replicas an endpoint needs from the gateway's reports. Pure: time is an argument."""
