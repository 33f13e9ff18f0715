"""What every request passes through on its way to a route."""
