"""The gateway's processes: a supervisor, the picker beside Envoy, and the configuration in force."""
