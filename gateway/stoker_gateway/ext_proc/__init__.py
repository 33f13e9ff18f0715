"""The endpoint picker: a gRPC server that Envoy asks where a request goes."""
