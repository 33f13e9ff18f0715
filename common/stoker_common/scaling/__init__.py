"""What the gateway's replicas report of requests, for whatever scales by it."""
