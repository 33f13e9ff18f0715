"""Rate limits of keys: enforcement and usage, for one replica of the gateway or several."""
