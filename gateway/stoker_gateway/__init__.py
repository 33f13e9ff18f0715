"""One address before the servers of many models: Envoy moves the bytes, a picker decides where they go."""
