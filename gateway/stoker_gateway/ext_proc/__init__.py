"""The endpoint picker: a gRPC server that chooses the servers of each request for Envoy."""
