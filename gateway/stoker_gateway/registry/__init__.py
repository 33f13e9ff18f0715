"""The registry of served models and their servers."""
