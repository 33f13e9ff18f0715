"""What became of requests, and what they used."""
