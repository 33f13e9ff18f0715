"""Which server gets a request. Pure: time is an argument, and nothing is sent."""
