"""Choice of a server for each request. Time is an argument, and there is no I/O."""
