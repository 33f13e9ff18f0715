"""What servers report of themselves: each is polled in turn."""
