"""The endpoint picker: a gRPC server that tells Envoy where to send each request."""
