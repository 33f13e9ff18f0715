"""Anthropic's Messages API: its bodies → chat requests, a chat run's parts → its messages and events."""
