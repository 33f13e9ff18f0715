"""The Responses API: a conversation is a list of items, and may be continued by the id of its last answer."""
