"""The gateway replicas' reports of requests and engine loads, for autoscaling."""
