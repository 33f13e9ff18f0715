"""Where a model's files come from: the hub, a demo package, or a folder."""
