"""Anthropic's Messages API: its bodies → chat requests, what a turn gives → its messages and events."""
