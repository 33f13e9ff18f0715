"""Field types that the bodies and responses of several APIs share, and JSON as text."""
