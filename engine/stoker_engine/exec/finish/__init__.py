"""What a runner makes of a step's hidden states."""
