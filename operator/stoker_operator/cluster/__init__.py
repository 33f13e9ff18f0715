"""What is read from the cluster: the API server, its objects, running engines, hub models."""
