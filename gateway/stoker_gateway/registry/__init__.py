"""Which models are served, and by which servers."""
