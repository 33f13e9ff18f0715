"""What errors tell clients, and the shape that each API gives them."""
