"""Types of fields that the bodies and answers of several APIs share, and JSON as text."""
