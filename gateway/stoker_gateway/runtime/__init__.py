"""The gateway's supervisor, the picker's process, and the live configuration."""
