"""How many replicas an endpoint needs, by what the gateway's replicas report. Pure: time is an argument."""
