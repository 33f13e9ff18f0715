"""Access to the cluster: the API server and its objects, running engines, hub models."""
