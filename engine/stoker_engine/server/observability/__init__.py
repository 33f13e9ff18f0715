"""What the server says about itself: health, logs, metrics."""
