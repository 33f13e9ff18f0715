"""Choice of a server for each request. Pure code: time is an argument, and there is no I/O."""
