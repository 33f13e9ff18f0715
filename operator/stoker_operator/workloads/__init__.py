"""The kinds of object that run an endpoint's pods, and of which workloads an endpoint consists."""
