"""Computes an endpoint's number of replicas from the gateway's reports. Pure: time is an argument."""
