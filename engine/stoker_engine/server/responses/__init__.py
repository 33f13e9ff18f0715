"""The Responses API: conversations as lists of items, which can be continued by the id of a stored response."""
