"""Rate limits of keys: enforcement and usage, in a single gateway or shared by its replicas."""
