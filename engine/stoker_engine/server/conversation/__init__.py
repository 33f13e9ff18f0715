"""API-independent conversations: requests, their prompts and runs, and event streams."""
