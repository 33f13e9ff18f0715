"""Anthropic's Messages API: bodies → requests, and parts of an answer → messages and events."""
