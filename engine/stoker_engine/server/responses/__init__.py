"""The Responses API: a conversation is a list of items, and may be gone on with by the id of its last answer."""
