"""Names and paths that Envoy, clients and the picker agree on."""
