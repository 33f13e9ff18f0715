"""Conversations, whatever API they came by: a request, its run, and the parts of the answer."""
