"""API-independent conversations: a request, its run, and the parts of the answer."""
