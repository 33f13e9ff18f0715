"""Reports of the gateway's replicas about requests, for autoscaling."""
