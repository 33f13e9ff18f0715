"""What the chat and completion APIs share: from a checked request to streamed results."""
