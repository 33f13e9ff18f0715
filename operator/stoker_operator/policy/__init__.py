"""The administrator's policy: what endpoints may use, and what is added to their objects."""
