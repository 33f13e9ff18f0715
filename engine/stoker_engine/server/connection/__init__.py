"""Request bodies, and clients that disconnect."""
