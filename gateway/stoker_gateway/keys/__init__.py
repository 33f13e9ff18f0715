"""API keys of clients: the models and limits of each key, and where keys are stored."""
