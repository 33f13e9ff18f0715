"""Anthropic's Messages API: its bodies → requests, the parts of an answer → its messages and events."""
