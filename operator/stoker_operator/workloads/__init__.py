"""The kinds of object that run an endpoint's pods, and the composition of endpoints from workloads."""
