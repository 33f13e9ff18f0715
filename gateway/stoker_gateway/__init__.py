"""One address for the servers of many models: Envoy forwards the requests, and a picker chooses the servers."""
