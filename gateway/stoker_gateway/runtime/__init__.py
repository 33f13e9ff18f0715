"""The gateway's processes, a supervisor and the picker beside Envoy, and the live configuration."""
